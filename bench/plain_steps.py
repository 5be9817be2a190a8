"""What a plain step takes beside mlx-lm's, and what two of its rules have to do with it.

    python -m bench.plain_steps

lets generators continue one prompt in turns, a few tokens at a time: mlx-lm, which submits its
steps before it reads the last token and attends to no more keys than there are; mlxspec, which
submits its steps so too and attends to whole spans; and mlxspec with every step awaited, and with
short spans. Writes bench/results/plain_steps.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from bench.common import RESULTS
from bench.pairs import in_turns
from mlxspec import StaticShapeEngine
from mlxspec.benchmark import Spread, load_workload, markdown_table, provenance, write_json

MODELS = ("smollm2:bf16", "smollm2:4bit")
# Whether steps are submitted ahead, and slots of the smallest span; None is the engine's own.
OURS: dict[str, tuple[bool, int | None]] = {
    "mlxspec": (True, None),
    "mlxspec, every step awaited": (False, None),
    "mlxspec, spans of 32": (True, 32),
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
    """Milliseconds per token of each, and mlx-lm's over ours block by block.

    Args:
        model: A model of mlx-lm.
        prompt: Token ids.
        blocks: How many are timed of each; one more warms up.
        tokens: Tokens of a block.
    """
    count = (blocks + 1) * tokens + 1
    runs: list[Iterator[Any]] = [mlx_lm_generate_step(mx.array(prompt), model, max_tokens=count)]
    for ahead, span in OURS.values():
        options = {} if span is None else {"span_step": span}
        engine = StaticShapeEngine(model, max_context_length=len(prompt) + count + 16, **options)
        engine.steps_ahead = ahead
        runs.append(mlxspec.generate_step(prompt, model, max_tokens=count, engine=engine))
    samples, same = in_turns(runs, blocks, tokens)
    return {
        "same_tokens": same,
        "ms_per_token": {
            name: asdict(Spread.of(times))
            for name, times in zip(["mlx-lm", *OURS], samples, strict=True)
        },
        "times_mlx_lm": {
            name: asdict(Spread.of([a / b for a, b in zip(samples[0], times, strict=True)]))
            for name, times in zip(OURS, samples[1:], strict=True)
        },
    }


def _page(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        for name, spread in case["times_mlx_lm"].items():
            rows.append(
                [
                    case["model"],
                    name,
                    f"{case['ms_per_token'][name]['median']:.1f}",
                    f"{spread['median']:.3f}x ({spread['lower_quartile']:.3f} to "
                    f"{spread['upper_quartile']:.3f})",
                    "yes" if case["same_tokens"] else "NO",
                ]
            )
    header = ["model", "", "ms a token", "times mlx-lm's speed (quartiles of blocks)", "same ids"]
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
