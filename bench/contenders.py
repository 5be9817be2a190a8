"""The ways of generating that are compared, each behind one call with one clock.

The clock runs from the moment all of the prompt but its last token has been processed to the last
token. Prefill is outside for everyone, and the first token inside, since a speculative decoder
brings several tokens with it. Everything is traced and every kernel compiled before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec import Drafter, SpeculationStats, StaticShapeEngine


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

    name: str

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
        cache = _prefilled(self.model, prompt)
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
        caches = _prefilled(self.model, prompt) + _prefilled(self.draft, prompt)
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
    """mlxspec's `generate_step`, greedy, with a drafter or without one."""

    name: str
    model: nn.Module
    engine: StaticShapeEngine
    make_drafter: Callable[[], Drafter] | None = None
    num_draft_tokens: int = 0

    def warm_up(self, prompt: list[int], limit: int) -> None:
        """Trace every tile that a generation this long may meet: each width in each span."""
        first = len(prompt) - 1
        tokens = prompt * (2 + limit // len(prompt))
        widths = self.engine.tile_widths if self.make_drafter else self.engine.tile_widths[:1]
        # Every span begins at a multiple of the smallest, which has 256 slots. The last comes
        # first: a cache that grows later would have its tiles traced again.
        later = range(first - first % 256 + 256, first + limit, 256)
        for position in (*reversed(later), first):
            stats = SpeculationStats()
            with closing(
                mlxspec.generate_step(
                    tokens[: position + 1],
                    self.model,
                    engine=self.engine,
                    drafter=_EveryWidth(widths),
                    num_draft_tokens=widths[-1] - 1,
                    max_tokens=2 * sum(widths),
                    stats=stats,
                )
            ) as steps:
                while stats.rounds <= len(widths):
                    next(steps)

    def run(self, prompt: list[int], limit: int, stop: Collection[int]) -> Run:
        """See `Contender`."""
        stats = SpeculationStats()
        begin = 0.0

        def mark(processed: int, total: int) -> None:
            nonlocal begin
            begin = time.perf_counter()

        tokens: list[int] = []
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
                prompt_progress_callback=mark,
            )
        ) as steps:
            for token, _, _ in steps:
                tokens.append(token)
                seconds = time.perf_counter() - begin
        return Run(
            tokens,
            seconds,
            stats.forwards,
            stats.traces > 0,
            {
                "tile_widths": list(self.engine.tile_widths),
                "num_draft_tokens": self.num_draft_tokens,
                "compiled": self.engine.compiled,
                "stats": stats.as_dict(),
            },
        )


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


def _prefilled(model: nn.Module, prompt: list[int]) -> list[Any]:
    """mlx-lm's caches after all of the prompt but its last token."""
    cache = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    mx.clear_cache()
    return list(cache)
