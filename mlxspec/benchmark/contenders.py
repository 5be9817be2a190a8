"""The ways of generating that are compared, each behind one call with one clock.

The clock runs from the moment all of the prompt but its last token has been processed to the last
token. Prefill is outside for everyone, and the first token inside, since a speculative decoder
brings several tokens with it. Everything is traced and every kernel compiled before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec import Drafter, SpeculationStats, StaticShapeEngine
from mlxspec.engine.spans import SpanRule

_PREFILL_STEP = 2048


@dataclass(frozen=True)
class Run:
    """One generation.

    Attributes:
        tokens: What was generated; an end token is the last.
        seconds: What the clock showed.
        forwards: Forwards of the target model.
        traced: Whether something was traced meanwhile, so that the time tells nothing.
        details: What a reader may want to know besides, ready for JSON.
    """

    tokens: list[int]
    seconds: float
    forwards: int
    traced: bool = False
    details: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """A way of generating."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def warm_up(self, prompt: list[int], limit: int) -> None:
        """Trace and compile what `run` with these arguments will meet."""

    def run(self, prompt: list[int], limit: int, stop: Collection[int]) -> Run:
        """Generate up to `limit` tokens, or to the first of `stop`."""


@dataclass(frozen=True)
class MlxLmPlain:
    """mlx-lm's `generate_step`, greedy."""

    model: nn.Module
    name: str = "mlx-lm plain"

    def warm_up(self, prompt: list[int], limit: int) -> None:
        """A few tokens: mlx-lm traces nothing as long as the text."""
        self.run(prompt, 4, ())

    def run(self, prompt: list[int], limit: int, stop: Collection[int]) -> Run:
        """See `Contender`."""
        cache = prefilled(self.model, prompt)
        tokens: list[int] = []
        begin = time.perf_counter()
        with closing(
            generate_step(mx.array(prompt[-1:]), self.model, max_tokens=limit, prompt_cache=cache)
        ) as steps:
            for token, _ in steps:
                tokens.append(int(token))
                seconds = time.perf_counter() - begin
                if tokens[-1] in stop:
                    break
        # The step that mlx-lm computes ahead of the last token is on nobody's clock.
        mx.synchronize(generation_stream)
        return Run(tokens, seconds, len(tokens))


@dataclass(frozen=True)
class MlxLmSpeculative:
    """mlx-lm's `speculative_generate_step`, greedy, with a draft model."""

    model: nn.Module
    draft: nn.Module
    draft_name: str
    num_draft_tokens: int
    name: str = "mlx-lm speculative"

    def warm_up(self, prompt: list[int], limit: int) -> None:
        """A few rounds: mlx-lm traces nothing as long as the text."""
        self.run(prompt, 2 * self.num_draft_tokens + 2, ())

    def run(self, prompt: list[int], limit: int, stop: Collection[int]) -> Run:
        """See `Contender`."""
        caches = prefilled(self.model, prompt) + prefilled(self.draft, prompt)
        tokens: list[int] = []
        drafted: list[bool] = []
        begin = time.perf_counter()
        with closing(
            speculative_generate_step(
                mx.array(prompt[-1:]),
                self.model,
                self.draft,
                num_draft_tokens=self.num_draft_tokens,
                max_tokens=limit,
                prompt_cache=caches,
            )
        ) as steps:
            for token, _, from_draft in steps:
                tokens.append(int(token))
                drafted.append(from_draft)
                seconds = time.perf_counter() - begin
                if tokens[-1] in stop:
                    break
        mx.synchronize(generation_stream)
        # A round ends with the target's own token, but for one that the limit cuts.
        rounds = drafted.count(False) + drafted[-1]
        details = {"draft_model": self.draft_name, "num_draft_tokens": self.num_draft_tokens}
        return Run(tokens, seconds, rounds, details=details)


@dataclass(frozen=True)
class Mlxspec:
    """mlxspec's `generate_step`, with a drafter or without one.

    Attributes:
        name: What tables call it.
        model: The target.
        engine: Its engine, emptied before every run so that all runs begin alike.
        make_drafter: Makes a run's drafter; None decodes plainly.
        num_draft_tokens: Most tokens to draft a round; None is what a user gets who does not say.
        sampling: Keyword arguments of `generate_step` that choose tokens; default: greedy.
        has_own_graphs: Whether the drafter traces graphs too, as a draft model does.
    """

    name: str
    model: nn.Module
    engine: StaticShapeEngine
    make_drafter: Callable[[], Drafter] | None = None
    num_draft_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    has_own_graphs: bool = False

    def warm_up(self, prompt: list[int], limit: int) -> None:
        """Trace every tile that a generation this long may meet: each width in each span."""
        first, step = len(prompt) - 1, SpanRule.step
        tokens = prompt * (2 + limit // len(prompt))
        widths = self.engine.tile_widths if self.make_drafter else self.engine.tile_widths[:1]
        # Every span begins at a multiple of the smallest. The last comes first: a cache that
        # grows later would have its tiles traced again.
        later = range(first - first % step + step, first + limit, step)
        for position in (*reversed(later), first):
            stats = SpeculationStats()
            # As `run` begins: an engine that goes on from what it holds prefills in fewer tiles.
            self.engine.reset(0)
            with closing(
                mlxspec.generate_step(
                    tokens[: position + 1],
                    self.model,
                    engine=self.engine,
                    drafter=_EveryWidth(widths),
                    num_draft_tokens=widths[-1] - 1,
                    max_tokens=2 * sum(widths),
                    stats=stats,
                    **self.sampling,
                )
            ) as steps:
                for _ in steps:
                    if stats.rounds > len(widths):
                        break

        if self.make_drafter and self.num_draft_tokens is None:
            # Measured when it is first asked for, which is not to be on the clock.
            _ = self.engine.tile_costs
        if self.has_own_graphs:
            self.run(prompt, limit, ())

    def run(self, prompt: list[int], limit: int, stop: Collection[int]) -> Run:
        """See `Contender`."""
        self.engine.reset(0)
        stats = SpeculationStats()
        tokens: list[int] = []
        rounds = _Rounds(stats)
        with closing(
            mlxspec.generate_step(
                prompt,
                self.model,
                engine=self.engine,
                drafter=self.make_drafter() if self.make_drafter else None,
                num_draft_tokens=self.num_draft_tokens,
                max_tokens=limit,
                stop_tokens=stop,
                stats=stats,
                **self.sampling,
            )
        ) as steps:
            begin = time.perf_counter()
            for token, _, _ in steps:
                tokens.append(token)
                rounds.look(len(tokens))
                # The prompt is read when the first token is asked for: a draft model's too.
                seconds = time.perf_counter() - begin - stats.seconds["prefill"]
        return Run(
            tokens,
            seconds,
            stats.forwards,
            stats.traces > 0,
            {
                "tile_widths": list(self.engine.tile_widths),
                "num_draft_tokens": self.num_draft_tokens,
                "compiled": self.engine.compiled,
                "drafts": rounds.drafts if self.make_drafter else [],
                "stats": stats.as_dict(),
            },
        )


class _Rounds:
    """How long each round's draft was, read off the counters as tokens come.

    Attributes:
        drafts: For each round, [tokens emitted before it, tokens drafted].
    """

    def __init__(self, stats: SpeculationStats):
        self._stats = stats
        self._rounds = self._drafted = 0
        self.drafts: list[list[int]] = []

    def look(self, emitted: int) -> None:
        """A token came; a round's first one brings the round's draft into the counters."""
        if self._stats.rounds > self._rounds:
            self.drafts.append([emitted - 1, self._stats.drafted - self._drafted])
            self._rounds, self._drafted = self._stats.rounds, self._stats.drafted


class _EveryWidth:
    """A drafter whose proposals fill a tile of each width once, the widest first."""

    def __init__(self, widths: Sequence[int]):
        self._widths = list(widths)

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """As many copies of the newest token as the next width has room for beside it."""
        width = self._widths.pop() if self._widths else 1
        return [history[-1]] * min(width - 1, budget)

    def commit(self, length: int) -> None:
        """Nothing is remembered."""

    def reset(self) -> None:
        """Nothing is remembered."""


def prefilled(model: nn.Module, tokens: list[int]) -> list[Any]:
    """mlx-lm's caches after all of the tokens but the last, in mlx-lm's own steps."""
    cache = make_prompt_cache(model)
    for begin in range(0, len(tokens) - 1, _PREFILL_STEP):
        model(mx.array([tokens[begin : min(begin + _PREFILL_STEP, len(tokens) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    mx.clear_cache()
    return list(cache)
