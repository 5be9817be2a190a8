"""Where draft models made of SmolLM2 agree with SmolLM2's own answers, for `bench.simulate`.

    python -m bench.record_drafts --openblas

writes bench/traces/draft_models.json within minutes. The answers are those of traces/smollm2.json.
A draft is the same model in few bits, or with layers left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

import mlxspec
from bench import openblas
from bench.draft_models import bytes_in_half_precision, keep_first_layers
from bench.simulate import DRAFT_TRACES, TRACES
from mlxspec.benchmark import provenance, write_json

# In float32, as the answers were given.
MODEL = "smollm2:f32"
BITS = (4, 3, 2)
LAYERS = (24, 20, 10)
# Prompt and answer in one forward round otherwise than token by token: a near tie may fall
# another way, and more than that is another model.
_LEAST_OWN_AGREEMENT = 0.99


def agreement(model: nn.Module, prompt: list[int], answer: list[int]) -> str:
    """Whether the model would draft each token of an answer, all before it being right.

    Args:
        model: The draft model.
        prompt: Token ids before the answer.
        answer: Token ids of the answer.

    Returns:
        For each token of the answer 1 if it is the draft model's likeliest there, else 0.
    """
    tokens = prompt + answer
    logits = model(mx.array([tokens[:-1]]))[0, len(prompt) - 1 :]
    likeliest = mx.argmax(logits, axis=-1).tolist()
    return "".join(str(int(ours == said)) for ours, said in zip(likeliest, answer, strict=True))


def drafts() -> Iterator[tuple[str, nn.Module, int]]:
    """The draft models one after the other: name, model, and bytes of its weights."""
    for bits in BITS:
        model, _ = mlxspec.load(MODEL)
        nn.quantize(model, bits=bits)
        size = bytes_in_half_precision(model)
        # As the numbers that the packed weights stand for: MLX multiplies packed ones on a CPU many
        # times slower than OpenBLAS does these. On the prose text, in 4 and in 3 bits, every
        # likeliest token was the same.
        yield f"in {bits} bits", dequantize_model(model), size
    for count in LAYERS:
        model, _ = mlxspec.load(MODEL)
        of = len(model.layers)
        keep_first_layers(model, count)
        yield f"{count} of {of} layers", model, bytes_in_half_precision(model)


def main() -> None:
    """Compare every draft model with every answer and write down where they agree."""
    parser = argparse.ArgumentParser(prog="python -m bench.record_drafts", description=__doc__)
    parser.add_argument(
        "--openblas", action="store_true", help="many times quicker, see bench/openblas.py"
    )
    parser.add_argument("--output", type=Path, default=DRAFT_TRACES, help="the file to write")
    arguments = parser.parse_args()
    if arguments.openblas:
        openblas.run_again_with_openblas("bench.record_drafts", sys.argv[1:])
    texts = json.loads((TRACES / "smollm2.json").read_text(encoding="utf-8"))["texts"]
    target, _ = mlxspec.load(MODEL)
    own = _agreements("the model itself", target, texts)
    share = sum(found.count("1") for found in own.values()) / sum(map(len, own.values()))
    if share < _LEAST_OWN_AGREEMENT:
        sys.exit(
            f"{MODEL}: expected the model that gave the answers of traces/smollm2.json, got one "
            f"that agrees with {share:.1%} of their tokens; convert the demo model again "
            "(`mlxspec models fetch`)"
        )
    report: dict[str, Any] = provenance() | {
        "what": "for each token of an answer, 1 if it is the draft model's likeliest after prompt "
        "and answer so far, else 0; bytes of weights with floats of 16 bits",
        "answers": "smollm2.json",
        "blas": openblas.proof() if openblas.preloaded() else "the wheel's own",
        "model": MODEL,
        "bytes": bytes_in_half_precision(target),
        "own_agreement": share,
        "drafts": {},
    }
    for name, model, size in drafts():
        agrees = _agreements(name, model, texts)
        report["drafts"][name] = {"bytes": size, "agrees": agrees}
    write_json(arguments.output, report)


def _agreements(name: str, model: nn.Module, texts: dict[str, Any]) -> dict[str, str]:
    """Of every text; how much there is of it is said on stderr."""
    found = {}
    for text, trace in texts.items():
        found[text] = agreement(model, trace["prompt"], trace["answer"])
        right = found[text].count("1")
        print(f"  {name}, {text}: {right} of {len(found[text])}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
