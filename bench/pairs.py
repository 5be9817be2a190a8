"""Two generators timed in turns, block by block, so that a machine's mood meets both."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from mlxspec import StaticShapeEngine
from mlxspec.benchmark import Spread, provenance, write_json


@dataclass(frozen=True)
class PlainPair:
    """Plain decoding by mlx-lm and by the static engine, milliseconds per token.

    Attributes:
        ratio: mlx-lm's time over the engine's, block by block; above 1 the engine is faster.
        same_tokens: Whether both said the same.
    """

    mlx_lm_ms: Spread
    mlxspec_ms: Spread
    ratio: Spread
    same_tokens: bool

    def __str__(self) -> str:
        quartiles = f"{self.ratio.lower_quartile:.2f} to {self.ratio.upper_quartile:.2f}"
        return (
            f"mlx-lm {self.mlx_lm_ms.median:.2f} ms, mlxspec {self.mlxspec_ms.median:.2f} ms, "
            f"{self.ratio.median:.2f} (quartiles {quartiles}) times mlx-lm's speed, same tokens: "
            f"{self.same_tokens}"
        )


def plain_pair(
    model: nn.Module, prompt: mx.array, blocks: int, tokens: int, **engine_options: Any
) -> PlainPair:
    """Let both continue the prompt, `tokens` at a time; the first block warms up.

    Args:
        model: A model of mlx-lm.
        prompt: Token ids, [n].
        blocks: How many pairs of blocks are timed.
        tokens: Tokens of one block.
        **engine_options: Of `StaticShapeEngine`.
    """
    count = (blocks + 1) * tokens + 1
    engine = StaticShapeEngine(model, max_context_length=prompt.size + count + 16, **engine_options)
    steps: tuple[Iterator[Any], Iterator[Any]] = (
        mlx_lm_generate_step(prompt, model, max_tokens=count),
        mlxspec.generate_step(prompt, model, max_tokens=count, engine=engine),
    )
    samples, same = in_turns(steps, blocks, tokens)
    ratios = [theirs / ours for theirs, ours in zip(*samples, strict=True)]
    return PlainPair(Spread.of(samples[0]), Spread.of(samples[1]), Spread.of(ratios), same)


def in_turns(
    runs: Sequence[Iterator[Any]], blocks: int, tokens: int
) -> tuple[list[list[float]], bool]:
    """Time generators block by block; who is first changes from block to block.

    Args:
        runs: Each yields tuples that begin with a token.
        blocks: How many blocks of each are timed; one more warms up.
        tokens: Tokens of one block.

    Returns:
        Milliseconds per token of every run's blocks, and whether all said the same.
    """
    samples: list[list[float]] = [[] for _ in runs]
    same = True
    for block in range(blocks + 1):
        order = [(block + i) % len(runs) for i in range(len(runs))]
        found = {i: _timed(runs[i], tokens) for i in order}
        same = same and all(ids == found[0][1] for _, ids in found.values())
        for i in order if block else ():
            samples[i].append(found[i][0])
    return samples, same


def write_result(file: Path, blocks: int, tokens: int, cases: list[dict[str, Any]]) -> None:
    """Write cases of `PlainPair` and what they were measured on as JSON."""
    result = provenance() | {
        "what": "plain decoding, milliseconds per token, spread over paired blocks",
        "blocks": blocks,
        "tokens_per_block": tokens,
        "cases": cases,
    }
    write_json(file, result)


def case_of(pair: PlainPair, **facts: Any) -> dict[str, Any]:
    """A case of a result: its facts, then its figures."""
    return facts | asdict(pair)


def _timed(steps: Iterator[Any], tokens: int) -> tuple[float, list[int]]:
    """Milliseconds per token of the next tokens; what is begun beyond them is waited for."""
    mx.synchronize()
    begin = time.perf_counter()
    ids = [int(next(steps)[0]) for _ in range(tokens)]
    mx.synchronize()
    return (time.perf_counter() - begin) / tokens * 1e3, ids
