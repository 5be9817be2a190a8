"""The verification itself: plain decoding first, then everything that has to be equal to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.benchmark.contenders import prefilled
from mlxspec.decoding.sampling import Sampling
from mlxspec.drafting import Drafter, DraftModel
from mlxspec.engine import StaticShapeEngine
from mlxspec.engine.exactness import width_classes
from mlxspec.engine.spans import SpanRule
from mlxspec.engine.support import default_placement
from mlxspec.errors import MlxspecError
from mlxspec.verification.drafters import drafters
from mlxspec.verification.places import Place, places
from mlxspec.verification.rows import (
    Answer,
    MlxLmRows,
    capped,
    compare,
    distance,
    first_beyond,
    generate,
    mlx_lm_rows,
    return_to,
    score,
)
from mlxspec.verification.verdict import Check, Difference, Price, Status, Verdict

_SAMPLING = Sampling(temp=0.8)
# Drafters that leave most behind: they alone run where a whole prompt is prefilled for each.
_HARSHEST = ("an oracle half wrong", "a drafter always wrong")
_PRICE_STEPS = 8

Report = Callable[[str], None]


def verify_model(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_tokens: int = 64,
    up_to: int | None = None,
    draft_model: nn.Module | None = None,
    widened: bool = True,
    report: Report | None = None,
    **engine_options: Any,
) -> Verdict:
    """Generate plainly, then compare bit for bit: every width, drafters good and bad, mlx-lm.

    It is done after the prompt and at every place further on where an engine changes what it
    computes, see `places`; the text up to there is the prompt and its answer, over and over.

    Args:
        model: A model of mlx-lm that the static engine takes.
        prompt: Token ids.
        max_tokens: How much to generate after the prompt.
        up_to: How long a text to look at, in tokens; None is quick.
        draft_model: A model of the same vocabulary that drafts; the model itself does anyway.
        widened: Take the wider tiles too that drafting is given where they pay.
        report: Called with the name of each check before it runs.
        **engine_options: See `StaticShapeEngine`.

    Returns:
        The verdict; a difference does not raise.
    """
    say = report or (lambda name: None)
    engine = _engine(model, widened, **engine_options)
    seen, not_reached = places(engine, len(prompt), max_tokens, up_to)
    say("plain decoding")
    first = generate(engine, prompt, seen[0])
    cycle = [*prompt, *first.tokens]
    others = _other_engines(model, engine, widened, engine_options)
    checks: list[Check] = []
    for place in seen:
        text = list(prompt) if place is seen[0] else _repeated(cycle, place.start + 1)
        try:
            plain = first if place is seen[0] else generate(engine, text, place)
        except (MlxspecError, ValueError) as problem:
            checks.append(_raised("plain decoding", engine, place, True, problem))
            continue
        look = _Look(model, engine, draft_model, text, place, plain, say)
        checks += look.at_everything(others, thorough=place is seen[0])
    say("widths")
    # Measured anew, over the whole ladder: what an engine remembers is not proved by being asked.
    whole = others.get("whole ladder") or _engine(model, widened, exact=False, **engine_options)
    usable = tuple(w for w in whole.tile_widths if w < whole.max_context_length)
    classes = width_classes(whole, usable)
    say("price of exactness")
    price = _price(model, engine, whole, cycle[: engine.max_context_length - 1])
    say("kernels")
    kernels, kernels_passed = _kernels()
    return Verdict(
        device=str(mx.default_device()),
        versions={name: version(name) for name in ("mlxspec", "mlx", "mlx-lm")},
        tokens=len(first.tokens),
        classes=classes,
        widths=engine.tile_widths,
        note=engine.note,
        places=[place.name for place in seen],
        not_reached=[f"{place.name} (--up-to {place.end})" for place in not_reached],
        price=price,
        kernels=kernels,
        kernels_passed=kernels_passed,
        checks=checks,
    )


@dataclass(frozen=True)
class _Look:
    """Everything that is compared at one place.

    Attributes:
        model: mlx-lm's.
        engine: The engine that generates.
        draft_model: Drafts, beside the model itself, where one is given.
        text: The sequence up to the place.
        place: Where.
        plain: Plain decoding's answer there.
        say: Told the name of each check before it runs.
    """

    model: nn.Module
    engine: StaticShapeEngine
    draft_model: nn.Module | None
    text: list[int]
    place: Place
    plain: Answer
    say: Report

    def at_everything(self, others: dict[str, StaticShapeEngine], thorough: bool) -> list[Check]:
        """All comparisons.

        Args:
            others: Engines that are not in use, by what they are.
            thorough: With all drafters and sampled too.
        """
        self.say(f"{self.place.name}: mlx-lm")
        theirs = mlx_lm_rows(self.model, self.text, self.place, self.plain)
        checks = [
            self._scored(self.engine, width, f"scored in tiles of {width}", None)
            # The widest first: what it wrote past the place is there when the others look.
            for width in reversed(self.engine.tile_widths)
        ]
        for name, engine in others.items():
            for width in engine.tile_widths:
                if name != "whole ladder":
                    checks.append(self._scored(engine, width, f"{name} of {width}", theirs))
                elif width not in self.engine.tile_widths:
                    title = f"scored in tiles of {width}"
                    checks.append(self._scored(engine, width, title, theirs))
        checks += self._drafted(thorough)
        checks.append(self._against_mlx_lm(theirs))
        return checks

    def _scored(
        self, engine: StaticShapeEngine, width: int, name: str, theirs: MlxLmRows | None
    ) -> Check:
        """One width; `theirs` where the engine is not in use and may round another way."""
        # Recurrent layers read some rows again, so that only whole tiles keep to one width.
        shifted = engine is self.engine and default_placement(self.model) == "free"
        return self._check(
            engine,
            name,
            lambda: score(engine, self.text, self.place, self.plain, width, shifted),
            theirs,
        )

    def _drafted(self, thorough: bool) -> list[Check]:
        known = [*self.text[: self.place.start + 1], *self.plain.tokens]
        checks = []
        widest = self.engine.verify_tile_width
        for name, drafter in drafters(known, self.engine.vocab_size).items():
            if thorough or name in _HARSHEST:
                drafted = {"num_draft_tokens": widest - 1}
                checks.append(self._generated(f"drafted by {name}", self.plain, drafter, drafted))
            if name in _HARSHEST:
                longer = {"num_draft_tokens": self.place.length, "align_proposals": False}
                title = f"drafted by {name}, over several tiles"
                checks.append(self._generated(title, self.plain, drafter, longer))
        if thorough:
            drafter = drafters(known, self.engine.vocab_size)[_HARSHEST[0]]
            title = f"drafted by {_HARSHEST[0]}, as much as pays"
            checks.append(self._generated(title, self.plain, drafter, {"num_draft_tokens": None}))
            models = {"the model itself": self.model}
            if self.draft_model is not None:
                models["the draft model"] = self.draft_model
            for name, model in models.items():
                drafter = DraftModel(model, max_context_length=self.engine.max_context_length)
                options = {"num_draft_tokens": widest - 1}
                title = f"drafted by {name}"
                checks.append(self._generated(title, self.plain, drafter, options))
            self.say(f"{self.place.name}: sampled")
            plain = generate(self.engine, self.text, self.place, sampling=_SAMPLING)
            known = [*self.text[: self.place.start + 1], *plain.tokens]
            drafter = drafters(known, self.engine.vocab_size)[_HARSHEST[0]]
            sampled = {"num_draft_tokens": widest - 1, "sampling": _SAMPLING}
            title = f"sampled, drafted by {_HARSHEST[0]}"
            checks.append(self._generated(title, plain, drafter, sampled))
        return checks

    def _generated(
        self, name: str, plain: Answer, drafter: Drafter, options: dict[str, Any]
    ) -> Check:
        def work() -> Difference | None:
            other = generate(self.engine, self.text, self.place, drafter, **options)
            return compare(plain, other, self.place)

        return self._check(self.engine, name, work, None)

    def _against_mlx_lm(self, theirs: MlxLmRows) -> Check:
        plain = capped(self.plain)
        apart = distance(plain, theirs.answer)
        difference = first_beyond(plain, theirs, self.place)
        status: Status = "equal"
        if difference is not None:
            status = "near tie" if apart <= theirs.room else "fault"
        far = f"within {apart:.2g}" if apart else "bit for bit"
        detail = f"{len(plain.tokens)} tokens, rows {far}"
        if difference is not None:
            detail = f"{difference}; rounding makes {theirs.room:.2g} at most"
        return Check("mlx-lm's own rows", self.place.name, status, True, detail, difference)

    def _check(
        self,
        engine: StaticShapeEngine,
        name: str,
        work: Callable[[], Difference | None],
        theirs: MlxLmRows | None,
    ) -> Check:
        """Run one comparison.

        Args:
            engine: That does the work.
            name: Of the check.
            work: Finds the first difference.
            theirs: Where rounding is allowed for: how much of it.
        """
        self.say(f"{self.place.name}: {name}")
        in_use = theirs is None
        try:
            difference = work()
        except (MlxspecError, ValueError, RuntimeError) as problem:
            return _raised(name, engine, self.place, in_use, problem)
        if difference is None:
            detail = f"{len(self.plain.tokens)} tokens, bit for bit"
            return Check(name, self.place.name, "equal", in_use, detail)
        # What went wrong here is not to be found again by those that follow.
        engine.reset(0)
        near = theirs is not None and difference.largest <= theirs.room
        status: Status = "near tie" if near else "fault"
        return Check(name, self.place.name, status, in_use, str(difference), difference)


def _raised(
    name: str, engine: StaticShapeEngine, place: Place, in_use: bool, problem: Exception
) -> Check:
    """The check of something that raised; the engine is emptied."""
    where = f"at position {engine.processed_token_count}"
    engine.reset(0)
    return Check(name, place.name, "fault", in_use, f"{where}: {type(problem).__name__}: {problem}")


def _engine(model: nn.Module, widened: bool, **options: Any) -> StaticShapeEngine:
    engine = StaticShapeEngine(model, **options)
    return engine.widened() if widened else engine


def _other_engines(
    model: nn.Module, engine: StaticShapeEngine, widened: bool, options: dict[str, Any]
) -> dict[str, StaticShapeEngine]:
    """Engines that the model could be run in and is not: other widths, another placement."""
    found = {}
    if options.get("tile_widths") is None:
        whole = _engine(model, widened, **options | {"exact": False})
        if whole.tile_widths != engine.tile_widths:
            found["whole ladder"] = whole
    step = options.get("span_step", SpanRule.step)
    widths = [width for width in engine.tile_widths if width > 1 and step % width == 0]
    placement = options.get("placement") or default_placement(model)
    if placement != "aligned" and widths:
        aligned = options | {"placement": "aligned", "tile_widths": widths[-1:]}
        found["aligned tiles"] = StaticShapeEngine(model, **aligned)
    return found


def _repeated(cycle: list[int], length: int) -> list[int]:
    return (cycle * (length // len(cycle) + 1))[:length]


def _price(
    model: nn.Module, engine: StaticShapeEngine, whole: StaticShapeEngine, text: list[int]
) -> Price:
    """Plain steps in the class in use, in the narrowest tile and in mlx-lm, in turns."""
    cache = prefilled(model, text)
    exact: list[float] = []
    free: list[float] = []
    theirs: list[float] = []

    def ours(each: StaticShapeEngine) -> float:
        return_to(each, text, len(text) - 1)
        return _seconds(lambda: each.verify(text[-1:]))

    for turn in range(_PRICE_STEPS + 2):
        taken = (
            ours(engine),
            ours(whole),
            _seconds(lambda: model(mx.array([text[-1:]]), cache=cache)[0, -1].argmax().item()),
        )
        if turn >= 2:  # the first trace and compile
            for kept, seconds in zip((exact, free, theirs), taken, strict=True):
                kept.append(seconds * 1e3)
    medians = [statistics.median(sample) for sample in (exact, free, theirs)]
    return Price(engine.tile_widths[0], medians[0], whole.tile_widths[0], medians[1], medians[2])


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _kernels() -> tuple[str | None, bool]:
    """The scan kernels against their reference, where there are kernels."""
    if not mx.metal.is_available():
        return None, True
    from mlxspec.scan import check_kernels

    verdict = check_kernels()
    return str(verdict), verdict.passed
