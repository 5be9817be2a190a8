"""What exactness costs recurrent models in plain decoding, against mlx-lm in the same run.

    python -m bench.aligned_cost

An aligned model computes a whole tile for every token, an anchored one a single row. Random models
decode plainly under both, in turns with mlx-lm. Writes bench/results/aligned_cost.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx

from bench.common import RESULTS
from bench.pairs import case_of, plain_pair, write_result
from mlxspec.engine.support import model_from_config

RESULT = RESULTS / "aligned_cost.json"
VOCAB = 4096
SHAPES = {
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 16,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "state_size": 64,
        "num_hidden_layers": 4,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 16,
    },
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 256,
        "block_ff_dim": 512,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
}
CASES = (
    ("mamba2", "aligned", (8,)),
    ("mamba2", "aligned", (4,)),
    ("lfm2", "anchored", (1, 2, 4, 8)),
    ("lfm2", "aligned", (8,)),
)


def main() -> None:
    """Measure, print a line per case, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.aligned_cost",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument("--blocks", type=int, default=20, help="pairs per case")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per block")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cases = []
    for name, placement, widths in CASES:
        mx.random.seed(0)
        model = model_from_config(SHAPES[name]).eval()
        mx.eval(model.parameters())
        prompt = mx.random.randint(0, VOCAB, (64,), key=mx.random.key(1))
        pair = plain_pair(
            model,
            prompt,
            arguments.blocks,
            arguments.tokens,
            tile_widths=widths,
            placement=placement,
        )
        print(f"{name}, {placement} {widths}: {pair}", flush=True)
        cases.append(case_of(pair, model=name, placement=placement, tile_widths=widths))
    write_result(arguments.output, arguments.blocks, arguments.tokens, cases)


if __name__ == "__main__":
    main()
