"""Where in a context the kernels change, and what tiles compute and cost there.

Attention takes other kernels for more keys, and for quantised ones, and another kernel may round
another way. So which widths compute the same bits is a question for each such regime.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxspec.engine.costs import TileCosts
from mlxspec.engine.spans import SpanRule, TileLimits

# Numbers of keys at about which attention changes its kernel, on one device or another.
KERNEL_CHANGES = (1024, 4096, 8192)


@dataclass(frozen=True)
class Regime:
    """A stretch of a context whose tiles run on the same kernels.

    Attributes:
        keys: Keys from which on attention may run on other kernels; 0 for the first.
        quantized: Whether they are quantised.
    """

    keys: int = 0
    quantized: bool = False

    @staticmethod
    def of(span: int, quantized: bool) -> Regime:
        """The regime of a row that attends to `span` keys."""
        return Regime(max((keys for keys in KERNEL_CHANGES if keys <= span), default=0), quantized)

    def position(self, spans: SpanRule, quantized_from: int | None) -> int:
        """The first position of the regime at which a span begins."""
        position = 0
        while spans.span(position) < self.keys or (
            self.quantized and quantized_from is not None and position < quantized_from
        ):
            position = spans.span(position)
        return position


@dataclass(frozen=True)
class Measured:
    """What was found in one regime.

    Attributes:
        regime: Where.
        position: Where exactly.
        classes: Groups of widths whose rows are equal bit for bit.
        costs: Seconds of a tile by its width.
        remembered: Whether both were measured before.
    """

    regime: Regime
    position: int
    classes: list[tuple[int, ...]]
    costs: TileCosts
    remembered: bool


def reachable(spans: SpanRule, quantized_from: int | None, context_length: int) -> list[Regime]:
    """The regimes that a context of this length meets, each once, in order."""
    found: list[Regime] = []
    position = 0
    while position < context_length - 1:
        span = spans.span(position)
        if quantized_from is None or position < quantized_from:
            found.append(Regime.of(span, quantized=False))
        if quantized_from is not None and quantized_from < span:
            found.append(Regime.of(span, quantized=True))
        position = span
    return list(dict.fromkeys(found))


class ComparedRegimes:
    """The regimes of a context, and in which of them widths have been compared.

    Args:
        limits: Where spans end and keys become quantised.
        context_length: Most tokens of the context.

    Attributes:
        compared: Where they have been, with the widths in use as the outcome; whoever compares
            sets it. A context begins in the first.
    """

    def __init__(self, limits: TileLimits, context_length: int):
        self._limits = limits
        self.compared = {self.at(0)}
        # At most eight; asked for at every block.
        self._begins = {
            regime: regime.position(limits.spans, limits.quantized_from)
            for regime in reachable(limits.spans, limits.quantized_from, context_length)
        }

    def at(self, position: int) -> Regime:
        """The regime of this position's row."""
        return Regime.of(self._limits.spans.span(position), self._limits.quantized_at(position))

    def begin(self, regime: Regime) -> int:
        """The first position of a regime at which a span begins."""
        return regime.position(self._limits.spans, self._limits.quantized_from)

    def include(self, position: int) -> bool:
        """Whether widths have been compared where this position's row runs."""
        return self.at(position) in self.compared

    def compared_until(self, begin: int, end: int) -> int:
        """The first position from `begin` on where widths are yet to be compared, or `end`."""
        if not self.include(begin):
            return begin
        begins = self._begins.items()
        later = (at for regime, at in begins if at > begin and regime not in self.compared)
        return min([end, *later])
