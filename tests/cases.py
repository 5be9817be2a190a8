"""Continuations to compare: by mlx-lm, by an engine plainly, by an engine with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from mlxspec import SpeculativeDecoder, SpeculativeDecodingOptions, StaticShapeEngine
from mlxspec.decoding import SpeculationStats
from mlxspec.drafting import Drafter
from tests.families.tiny import same_model, set_random_weights, tiny_configs

Plan = Sequence[tuple[str, int]]

# What a drafter may be: an oracle, right half of the time, wrong, of changing length, absurd.
PLANS: dict[str, Plan] = {
    "right": [("right", 40)],
    "noisy": [("right then wrong", 6), ("empty", 0), ("right then wrong", 3), ("right", 2)],
    "wrong": [("wrong", 40)],
    "hostile": [("edge ids", 4), ("wrong then right", 9), ("too long", 1), ("right then wrong", 8)],
}


@cache
def varied_model(name: str, **changes: Any) -> nn.Module:
    """The tiny model of that name with some fields of its config changed, in float32."""
    config = tiny_configs()[name]
    if "text_config" in config and not changes.keys() <= config.keys():
        config = config | {"text_config": config["text_config"] | changes}
    else:
        config = config | changes
    model = same_model(config)
    set_random_weights(model, seed=0)
    mx.eval(model.parameters())
    return model.eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Some prompt of that length."""
    return [(5 * i + 11 * seed + i * i // 3) % 60 + 1 for i in range(length)]


def mlx_lm_tokens(model: nn.Module, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """What mlx-lm generates, greedily."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, **options)
    return [int(token) for token, _ in steps]


def decode(
    engine: StaticShapeEngine,
    prompt: Sequence[int],
    count: int,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 16,
) -> tuple[list[int], SpeculationStats]:
    """The ids that an engine gives, and the counters of the run."""
    decoder = SpeculativeDecoder(engine, drafter, SpeculativeDecodingOptions(num_draft_tokens))
    emissions = decoder.generate(list(prompt), max_tokens=count)
    return [emission.token for emission in emissions], decoder.stats


def exact(array: mx.array) -> np.ndarray:
    """Any float dtype of mlx as float32, which holds all of them exactly."""
    return np.array(array.astype(mx.float32))
