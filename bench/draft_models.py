"""Imperfect drafts of a model: with layers left out, and what a draft's weights weigh."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def keep_first_layers(model: nn.Module, count: int) -> None:
    """Leave out all layers but the first, in place; the final norm and the head stay.

    A kept layer keeps its index, and with it its place in a pattern of windowed and global layers,
    its rotations and its kind of cache: mlx-lm's `make_cache` goes by the layers or by their number
    in the arguments.

    Args:
        model: A decoder of mlx-lm whose layers are `model.model.layers`.
        count: How many layers to keep.

    Raises:
        ValueError: There are not so many, or too few for mlx-lm: the model of a windowed pattern
            reads its global mask off the first global layer's cache, so that one has to be there.
    """
    least, most = getattr(model.args, "sliding_window_pattern", 1), len(model.model.layers)
    if not least <= count <= most:
        raise ValueError(f"layers to keep: expected {least} to {most} for this model, got {count}")
    del model.model.layers[count:]
    # The inner model holds the same arguments.
    model.args.num_hidden_layers = count
    if getattr(model.args, "layer_types", None):
        del model.args.layer_types[count:]


def bytes_in_half_precision(model: nn.Module) -> int:
    """What the weights take if their floats, scales of quantised ones included, have 16 bits."""
    return sum(
        2 * array.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes
        for _, array in tree_flatten(model.parameters())
    )
