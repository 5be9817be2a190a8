"""The survey of widths: what tiles of each compute and cost on this device, where they are run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.nn as nn

from mlxspec.engine.costs import (
    CANDIDATE_WIDTHS,
    TileCosts,
    measure_costs,
    remember_costs,
    remembered_costs,
    tile_widths_that_pay,
)
from mlxspec.engine.exactness import (
    best_class,
    remember_classes,
    remembered_classes,
    width_classes,
)
from mlxspec.engine.measurements import measured_in
from mlxspec.engine.protocol import SpeculativeEngine
from mlxspec.engine.regimes import Measured, Regime, reachable
from mlxspec.engine.spans import TileLimits
from mlxspec.engine.support import context_limit
from mlxspec.errors import in_words

_LOGGER = logging.getLogger(__name__)
# A price of exactness from which on it is said.
_NOTABLE_PRICE = 1.05


class StandIn(SpeculativeEngine, Protocol):
    """An engine that is measured in the place of another one like it."""

    def pretend(self, position: int) -> None:
        """Stand at this position, with a state of random numbers."""


@dataclass(frozen=True)
class WidthSurvey:
    """Finds out, or recalls from an earlier run, what widths are worth to an engine.

    Attributes:
        model: What the engine runs.
        options: How it does: the placement, the span step, and what is quantised from where,
            beside what no measurement depends on.
        context_length: Most tokens of its sequence.
        is_recurrent: Whether a layer has a state that only full tiles move on.
        may_widen: Whether its ladder may grow.
        make: Makes an empty engine like it, of `tile_widths` and with options changed.
    """

    model: nn.Module
    options: Mapping[str, Any]
    context_length: int
    is_recurrent: bool
    may_widen: bool
    make: Callable[..., StandIn]
    # What `equal_at` has answered before: a sequence may come to the same place again and again.
    _answers: dict[Any, tuple[tuple[int, ...], str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Those of them that are due to a failure, which may pass.
    _failures: set[Any] = field(default_factory=set, init=False, repr=False, compare=False)

    def widths(self, ladder: tuple[int, ...]) -> tuple[int, ...]:
        """The ladder, and the widths that it may be widened by, ascending."""
        if not self.may_widen:
            return ladder

        def possible(width: int) -> bool:
            """Whether an engine like this one could have the width beside its own."""
            limit = context_limit(self.model, width)
            return (
                width > ladder[0]
                and not (self.is_recurrent and width % ladder[0])
                and width < self.context_length - 1
                and (limit is None or self.context_length <= limit)
            )

        # A tile of one row is measured for the price of doing without it.
        return tuple(sorted({1, *ladder, *filter(possible, CANDIDATE_WIDTHS)}))

    def ladder_that_pays(self, ladder: tuple[int, ...], costs: TileCosts) -> tuple[int, ...]:
        """The ladder, and beside it the widths in which rows get cheaper, ascending."""
        possible = {*self.widths(ladder)} - {1}
        return tuple(sorted({*ladder, *possible.intersection(tile_widths_that_pay(costs))}))

    def regimes(self, ladder: tuple[int, ...], limits: TileLimits) -> Iterator[Measured]:
        """What tiles compute and cost in every kernel regime that the context can reach."""
        widths = self.widths(ladder)
        begun = False
        for regime in reachable(limits.spans, limits.quantized_from, self.context_length):
            position = regime.position(limits.spans, limits.quantized_from)
            if position + 2 * widths[-1] >= self.context_length and begun:
                continue
            quantized = limits.quantized_at(position)
            if Regime.of(limits.spans.span(position), quantized) != regime:
                # It ends before a span begins in it.
                continue
            classes, known = self.classes_at(position, widths, quantized)
            costs, also_known = self.costs_at(position, widths, quantized)
            yield Measured(regime, position, classes, costs, known and also_known)
            begun = True

    def costs_at(
        self, position: int, widths: tuple[int, ...], quantized: bool = False
    ) -> tuple[TileCosts, bool]:
        """Seconds of a tile by its width, and whether they were remembered.

        Args:
            position: Where the tiles start.
            widths: Rows, ascending.
            quantized: Whether keys are seen quantised there.
        """
        where = {"position": position} if position else {}
        circumstances = self._measured_in(
            costs_of=widths,
            cores=os.cpu_count(),
            kv_bits=self.options["kv_bits"],
            **where,
            **self._room(position, widths),
        )
        costs = remembered_costs(circumstances)
        if costs is not None:
            return costs, True
        if not position:
            _say("timing forwards of up to", widths)
        costs = measure_costs(self._stand_in(position, widths, quantized), widths)
        remember_costs(circumstances, costs)
        return costs, False

    def classes_at(
        self,
        position: int,
        widths: tuple[int, ...],
        quantized: bool = False,
        engine: SpeculativeEngine | None = None,
    ) -> tuple[list[tuple[int, ...]], bool]:
        """Groups of widths that compute the same bits, and whether they were remembered.

        They are compared on `engine`, which stands there, or on a stand-in; the rest is as for
        `costs_at`.
        """
        where: dict[str, Any] = {}
        if position:
            options = ("kv_bits", "kv_group_size", "quantized_kv_start")
            where = {"position": position} | {name: self.options[name] for name in options}
        circumstances = self._measured_in(widths=widths, **where, **self._room(position, widths))
        classes = remembered_classes(circumstances)
        if classes is not None:
            return classes, True
        if not position:
            _say("comparing forwards of up to", widths)
        classes = width_classes(engine or self._stand_in(position, widths, quantized), widths)
        remember_classes(circumstances, classes)
        return classes, False

    def equal_at(
        self, position: int, ladder: tuple[int, ...], quantized: bool
    ) -> tuple[tuple[int, ...], str]:
        """The part of the ladder that is one class from this position on, and why no more is.

        A state that is only moved in full tiles needs the narrowest width. There is no such part,
        and the answer empty, where no width's rows agree, or where nothing can be compared because
        the context or the memory has no room for it.
        """
        question = position, ladder, quantized
        if question in self._answers:
            return self._answers[question]
        classes: list[tuple[int, ...]] = []
        if position + 1 + ladder[-1] < self.context_length:
            reason = "round differently"
            try:
                classes, _ = self.classes_at(position, ladder, quantized)
            except Exception as failure:  # whatever a device meets: a text is not ended by this
                reason = f"could not be compared ({in_words(failure)})"
                self._failures.add(question)
        else:
            reason = "have no room to be compared"
        if self.is_recurrent:
            classes = [group for group in classes if ladder[0] in group]
        answer = best_class(classes) if classes else (), reason
        self._answers[question] = answer
        return answer

    def forget_failures(self) -> bool:
        """Compare again what could not be compared: another sequence begins.

        Returns:
            Whether there was any.
        """
        failures = list(self._failures)
        for question in failures:
            self._answers.pop(question, None)
        self._failures.clear()
        return bool(failures)

    def _stand_in(self, position: int, widths: tuple[int, ...], quantized: bool) -> StandIn:
        """Another engine that stands at this position."""
        changes: dict[str, Any] = {"initial_capacity": position and position + 2 * widths[-1]}
        if not quantized:
            # No tile is to end where keys become quantised, which may be the next position.
            changes["kv_bits"] = None
        engine = self.make(tile_widths=widths, **changes)
        if position:
            engine.pretend(position)
        return engine

    def _room(self, position: int, widths: tuple[int, ...]) -> dict[str, int]:
        """How long the context is where that cuts a measurement short, which says less then."""
        room = self.context_length - position
        return {"room": room} if room <= 2 * widths[-1] else {}

    def _measured_in(self, **what: Any) -> dict[str, Any]:
        """The circumstances of a measurement."""
        options = {name: self.options[name] for name in ("placement", "span_step")}
        return measured_in(self.model, **options, **what)


def _say(what: str, widths: tuple[int, ...]) -> None:
    """Tell whoever listens what is going to take time, before a text begins."""
    _LOGGER.info("%s %d rows, once for this model and machine ...", what, widths[-1])


def price_of_exactness(costs: TileCosts, ladder: tuple[int, ...]) -> str | None:
    """A sentence about what a plain step costs without a tile of one row, if that is notable."""
    price = costs.of(ladder[0]) / costs.of(1)
    if 1 not in costs.widths or price <= _NOTABLE_PRICE:
        return None
    return (
        f"a plain step so costs {price:.2f} of one in a tile of 1 row, "
        "which exact=False (--no-exact) would save"
    )
