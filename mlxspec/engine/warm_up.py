"""What is found out about a model before tiles of it are traced, and the weights they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.engine.state import KVQuantization, StateLayout
from mlxspec.engine.support import why_not_quantized
from mlxspec.errors import UnsupportedModel


@dataclass(frozen=True)
class WarmModel:
    """A model whose constants have been evaluated.

    Attributes:
        layout: Its state.
        vocab_size: The width of a row of logits.
        weights: Its arrays by name, which the tiles hold as constants.
        own_changes: Names of those that the model itself replaces.
    """

    layout: StateLayout
    vocab_size: int
    weights: dict[str, mx.array]
    own_changes: set[str]

    def has_weights_of(self, model: nn.Module) -> bool:
        """Whether the model still has the arrays that it had."""
        now = _weights(model)
        return now.keys() == self.weights.keys() and all(
            now[name] is weight
            for name, weight in self.weights.items()
            if name not in self.own_changes
        )


def warm_up(model: nn.Module, widest_tile: int, quantization: KVQuantization | None) -> WarmModel:
    """Run one token eagerly, which evaluates what the tiles hold as constants.

    An array that is not evaluated when a tile is traced, such as a lazily built table of rope
    frequencies that is no parameter, would be computed again in every call.

    Raises:
        UnsupportedModel: The model cannot run with quantised keys and values.
    """
    before = _weights(model)
    caches = make_prompt_cache(model)
    token = mx.array([[0]])
    logits = model(token, cache=caches)
    mx.eval(logits, model.parameters())
    layout = StateLayout.of(caches, widest_tile)
    if quantization is not None and (reason := why_not_quantized(model, caches, quantization)):
        raise UnsupportedModel(f"kv_bits cannot be honoured for this model: {reason}")
    after = _weights(model)
    # Some forwards clip their own weights and put them back, each time in a new array.
    own_changes = {name for name, weight in before.items() if after[name] is not weight}
    return WarmModel(layout, logits.shape[-1], after, own_changes)


def _weights(model: nn.Module) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)
