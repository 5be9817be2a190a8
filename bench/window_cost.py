"""What a step of a sliding-window model costs in a long context, against mlx-lm in the same run.

    python -m bench.window_cost

builds a random model of Gemma 3's shape (five layers with a window for one without), fills its
context, and times plain decoding by mlx-lm and by the static engine in turns, a block of tokens
each, so that a change of the machine's mood meets both. The same model without windows shows what
a step would cost if it followed the context. Writes bench/results/window_cost.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from mlxspec import StaticShapeEngine
from mlxspec.engine.support import model_from_config

RESULT = Path(__file__).resolve().parent / "results" / "window_cost.json"
WINDOW = 512
SHAPE = {
    "model_type": "gemma3_text",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 32_768,
    "sliding_window_pattern": 6,
}


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    lower_quartile: float
    upper_quartile: float

    @staticmethod
    def of(sample: list[float]) -> Spread:
        lower, median, upper = statistics.quantiles(sample, n=4)
        return Spread(median, lower, upper)


@dataclass(frozen=True)
class StepCost:
    """Plain decoding at one context length; milliseconds per token.

    Attributes:
        window: Positions a windowed layer sees; None where all layers see everything.
        context: Tokens before the first step.
        ratio: mlx-lm's time over the engine's, block by block; above 1 the engine is faster.
        same_tokens: Whether both said the same.
    """

    window: int | None
    context: int
    mlx_lm_ms: Spread
    mlxspec_ms: Spread
    ratio: Spread
    same_tokens: bool


def gemma3_shaped(window: int) -> nn.Module:
    """A random model; the weights are the same whatever the window."""
    mx.random.seed(0)
    model = model_from_config(SHAPE | {"sliding_window": window})
    mx.eval(model.parameters())
    return model.eval()


def timed(steps: Iterator[Any], tokens: int) -> tuple[float, list[int]]:
    """Milliseconds per token of the next tokens, without what is begun beyond them."""
    mx.synchronize()
    begin = time.perf_counter()
    ids = [int(next(steps)[0]) for _ in range(tokens)]
    mx.synchronize()
    return (time.perf_counter() - begin) / tokens * 1e3, ids


def measure(window: int | None, context: int, blocks: int, tokens: int) -> StepCost:
    """Fill the context twice, then let both decode block by block."""
    count = (blocks + 1) * tokens
    model = gemma3_shaped(window or context + count + 1)
    prompt = mx.random.randint(0, SHAPE["vocab_size"], (context,), key=mx.random.key(1))
    engine = StaticShapeEngine(model, max_context_length=context + count + 16)
    theirs = mlx_lm_generate_step(prompt, model, max_tokens=count + 1)
    ours = mlxspec.generate_step(prompt, model, max_tokens=count + 1, engine=engine)
    samples: tuple[list[float], list[float]] = ([], [])
    same = True
    with closing(theirs), closing(ours):
        for block in range(blocks + 1):
            # The order changes from block to block; the first one warms up.
            pair = {i: timed((theirs, ours)[i], tokens) for i in ((0, 1), (1, 0))[block % 2]}
            same = same and pair[0][1] == pair[1][1]
            for i in (0, 1) if block else ():
                samples[i].append(pair[i][0])
    ratios = [a / b for a, b in zip(*samples, strict=True)]
    return StepCost(
        window, context, Spread.of(samples[0]), Spread.of(samples[1]), Spread.of(ratios), same
    )


def main() -> None:
    """Measure, print a line per case, write the result."""
    parser = argparse.ArgumentParser(description="The cost of a step in a long context.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--blocks", type=int, default=20, help="pairs per case")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per block")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cases = []
    for context in arguments.contexts:
        for window in (WINDOW, None):
            cost = measure(window, context, arguments.blocks, arguments.tokens)
            cases.append(asdict(cost))
            print(
                f"context {context:6d}, window {window or 'none'}: "
                f"mlx-lm {cost.mlx_lm_ms.median:7.2f} ms, "
                f"mlxspec {cost.mlxspec_ms.median:7.2f} ms, {cost.ratio.median:.2f}x "
                f"({cost.ratio.lower_quartile:.2f} to {cost.ratio.upper_quartile:.2f}), "
                f"same tokens: {cost.same_tokens}",
                flush=True,
            )
    arguments.output.parent.mkdir(exist_ok=True)
    result = {
        "what": "plain decoding, milliseconds per token, median and quartiles over paired blocks",
        "shape": SHAPE,
        "device": str(mx.default_device()),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "blocks": arguments.blocks,
        "tokens_per_block": arguments.tokens,
        "cases": cases,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
