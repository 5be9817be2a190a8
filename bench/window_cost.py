"""What a step of a sliding-window model costs in a long context, against mlx-lm in the same run.

    python -m bench.window_cost

A random model of Gemma 3's shape (five layers with a window for one without) fills its context and
decodes plainly, in turns with mlx-lm. The same model without windows shows what a step would cost
if it followed the context. Writes bench/results/window_cost.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from bench.common import RESULTS
from bench.pairs import case_of, plain_pair, write_result
from mlxspec.engine.support import model_from_config

RESULT = RESULTS / "window_cost.json"
WINDOW = 512
SHAPE = {
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 32_768,
    "sliding_window_pattern": 6,
}


def gemma3_shaped(window: int) -> nn.Module:
    """A random model; the weights are the same whatever the window."""
    mx.random.seed(0)
    model = model_from_config(SHAPE | {"sliding_window": window})
    mx.eval(model.parameters())
    return model.eval()


def main() -> None:
    """Measure, print a line per case, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.window_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--blocks", type=int, default=20, help="pairs per case")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per block")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cases = []
    for context in arguments.contexts:
        prompt = mx.random.randint(0, SHAPE["vocab_size"], (context,), key=mx.random.key(1))
        for window in (WINDOW, None):
            # A window that is never full is none.
            model = gemma3_shaped(window or 2 * context)
            pair = plain_pair(model, prompt, arguments.blocks, arguments.tokens)
            print(f"context {context}, window {window}: {pair}", flush=True)
            cases.append(case_of(pair, context=context, window=window, shape=SHAPE))
    write_result(arguments.output, arguments.blocks, arguments.tokens, cases)


if __name__ == "__main__":
    main()
