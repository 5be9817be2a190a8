"""The span rule: how many key slots a position attends to, as a function of the position alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpanRule:
    """Buckets of key slots that grow with the position.

    Attention may sum in another order for another number of keys, so a position must meet the
    same span with drafting and without: the span depends on the position and on nothing else.
    Every new bucket is a new graph, and every slot past the position is work for nothing. Buckets
    of `step` slots up to sixteen steps, then eight buckets per doubling, keep the waste under an
    eighth from there on and the number of graphs logarithmic in the length.

    Attributes:
        step: Slots in the smallest bucket; every bucket is a multiple of it.
    """

    step: int = 256

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"span step: expected a positive number of slots, got {self.step}")

    def span(self, position: int) -> int:
        """The smallest bucket above `position`, in slots."""
        doublings = max(0, (position // self.step).bit_length() - 4)
        bucket = self.step << doublings
        return (position // bucket + 1) * bucket


@dataclass(frozen=True)
class TileLimits:
    """Positions that no decode tile crosses, so that its rows are what each would be alone.

    Attributes:
        spans: Rows of one tile attend to one span.
        quantized_from: First position whose row finds the keys quantised, if there is one.
    """

    spans: SpanRule
    quantized_from: int | None = None

    def end(self, position: int) -> int:
        """The first position that may not share a tile with `position`."""
        end = self.spans.span(position)
        if self.quantized_from is not None and position < self.quantized_from:
            return min(end, self.quantized_from)
        return end

    def quantized_at(self, position: int) -> bool:
        """Whether the row of this position finds the keys quantised."""
        return self.quantized_from is not None and position >= self.quantized_from
