"""What a plain step takes beside mlx-lm's, and what two of its rules and a drafter do to it.

    python -m bench.plain_steps

lets generators continue one prompt in turns, a few tokens at a time: mlx-lm, which submits its
steps before it reads the last token and attends to no more keys than there are; mlxspec, which
submits its steps so too and attends to whole spans; mlxspec with every step awaited, and with
short spans; and mlxspec with prompt lookup, which in this text finds hardly anything that pays.
Writes bench/results/plain_steps.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from bench.common import RESULTS
from bench.pairs import in_turns
from mlxspec import SpeculationStats, StaticShapeEngine
from mlxspec.benchmark import Spread, load_workload, markdown_table, provenance, write_json

MODELS = ("smollm2:bf16", "smollm2:4bit", "smollm2:f32")
PLAIN = "mlxspec"


class Way(NamedTuple):
    """One way of going on.

    Attributes:
        ahead: Whether steps are submitted ahead.
        span: Slots of the smallest span; None is the engine's own.
        lookup: Whether prompt lookup drafts, as much as pays.
    """

    ahead: bool = True
    span: int | None = None
    lookup: bool = False


OURS = {
    PLAIN: Way(),
    "mlxspec, every step awaited": Way(ahead=False),
    "mlxspec, spans of 32": Way(span=32),
    "mlxspec, prompt lookup": Way(lookup=True),
}


def main() -> None:
    """Measure, and write down what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plain_steps", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of each; %(default)s")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a block; %(default)s")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "plain_steps", help="results without their ending"
    )
    arguments = parser.parse_args()
    cases = []
    for name in arguments.models:
        model, tokenizer = mlxspec.load(name)
        prompt = load_workload("prose").prompt(tokenizer)
        cases.append({"model": name} | compared(model, prompt, arguments.blocks, arguments.tokens))
    page = _page(cases)
    print(page)
    result = {"blocks": arguments.blocks, "tokens_per_block": arguments.tokens, "cases": cases}
    write_json(arguments.output.with_suffix(".json"), provenance() | result)
    arguments.output.with_suffix(".md").write_text(page + "\n", encoding="utf-8")


def compared(model: nn.Module, prompt: list[int], blocks: int, tokens: int) -> dict[str, Any]:
    """Milliseconds per token of each, and mlx-lm's and plain ones over ours block by block.

    Args:
        model: A model of mlx-lm.
        prompt: Token ids.
        blocks: How many are timed of each; one more warms up.
        tokens: Tokens of a block.
    """
    count = (blocks + 1) * tokens + 1
    runs: list[Iterator[Any]] = [mlx_lm_generate_step(mx.array(prompt), model, max_tokens=count)]
    stats = {name: SpeculationStats() for name in OURS}
    for name, way in OURS.items():
        options = {} if way.span is None else {"span_step": way.span}
        engine = StaticShapeEngine(model, max_context_length=len(prompt) + count + 16, **options)
        engine.steps_ahead = way.ahead
        runs.append(
            mlxspec.generate_step(
                prompt,
                model,
                max_tokens=count,
                engine=engine,
                prompt_lookup=way.lookup,
                stats=stats[name],
            )
        )
    samples, same = in_turns(runs, blocks, tokens)
    plain = samples[1 + list(OURS).index(PLAIN)]
    return {
        "same_tokens": same,
        "drafted": {name: counted.drafted for name, counted in stats.items()},
        "ms_per_token": {
            name: asdict(Spread.of(times))
            for name, times in zip(["mlx-lm", *OURS], samples, strict=True)
        },
        "times_mlx_lm": {
            name: asdict(Spread.of([a / b for a, b in zip(samples[0], times, strict=True)]))
            for name, times in zip(OURS, samples[1:], strict=True)
        },
        "times_plain": {
            name: asdict(Spread.of([a / b for a, b in zip(plain, times, strict=True)]))
            for name, times in zip(OURS, samples[1:], strict=True)
        },
    }


def _page(cases: list[dict[str, Any]]) -> str:
    rows = [
        [
            case["model"],
            name,
            f"{case['ms_per_token'][name]['median']:.1f}",
            _quartiles(case["times_mlx_lm"][name]),
            _quartiles(case["times_plain"][name]),
            str(case["drafted"][name]),
            "yes" if case["same_tokens"] else "NO",
        ]
        for case in cases
        for name in OURS
    ]
    header = ["model", "", "ms a token", "times mlx-lm's speed (quartiles of blocks)"]
    header += ["times mlxspec's plain speed", "drafted", "same ids"]
    return markdown_table(header, rows)


def _quartiles(spread: dict[str, float]) -> str:
    lower, upper = spread["lower_quartile"], spread["upper_quartile"]
    return f"{spread['median']:.3f}x ({lower:.3f} to {upper:.3f})"


if __name__ == "__main__":
    main()
