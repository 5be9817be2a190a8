"""Tiny models of every family, with random weights that are the same in every run."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxspec.engine.support import model_from_config

_CONFIGS = Path(__file__).with_name("tiny_models.json")

# mlx_lm.models.olmo ends the interpreter if this package is missing, and uses nothing of it.
sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))


def tiny_configs() -> dict[str, dict[str, Any]]:
    """All configs by name: a family of mlx_lm.models, or "family+variant"."""
    return json.loads(_CONFIGS.read_text())


def tiny_model(name: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model of a few thousand weights whose greedy text does not fall into a rut at once.

    Args:
        name: A key of tiny_models.json.
        seed: Other seeds give other weights.
        dtype: Of the weights, but for those that the model itself keeps in float32.
    """
    model = same_model(tiny_configs()[name])
    set_random_weights(model, seed)
    keep = getattr(model, "cast_predicate", lambda path: True)
    cast = [
        (path, array.astype(dtype))
        for path, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating) and keep(path)
    ]
    model.load_weights(cast, strict=False)
    mx.eval(model.parameters())
    return model.eval()


def same_model(config: dict[str, Any]) -> nn.Module:
    """The model of a config; some draw a part of their weights, here the same in every run."""
    mx.random.seed(0)
    model = model_from_config(config)
    mx.eval(model.parameters())
    return model


def set_random_weights(model: nn.Module, seed: int) -> None:
    """Draw all weights but those of norms, in the order of their paths.

    Matrices are scaled up and embeddings down: where the two are tied, a strong embedding would
    repeat its own token for ever.
    """
    rng = np.random.default_rng(seed)
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    drawn = []
    for path, array in sorted(tree_flatten(model.parameters())):
        kind = kinds.get(path.rpartition(".")[0], "")
        if "norm" in kind.lower() or not mx.issubdtype(array.dtype, mx.floating):
            continue
        noise = rng.normal(size=array.shape).astype(np.float32)
        if array.ndim < 2:
            values = mx.array(0.1 * noise) + array.astype(mx.float32)
        else:
            values = mx.array(
                noise * np.float32(0.05 if kind == "Embedding" else 2 / array.shape[-1] ** 0.5)
            )
        drawn.append((path, values.astype(array.dtype)))
    model.load_weights(drawn, strict=False)
