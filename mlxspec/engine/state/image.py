"""A state without padding and rejected rows: all that another engine of the model goes on from."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxspec.engine.state.layout import StateLayout
from mlxspec.engine.state.model_state import Checkpoint, ModelState
from mlxspec.engine.state.ring import RingLayer


@dataclass(frozen=True)
class StateImage:
    """What is held of `tokens`, the same however they were drafted.

    Attributes:
        tokens: Every token the state covers.
        is_quantized: Whether keys and values have been converted.
        slots: Of every array of keys and values the positions held, [1, heads, held, size], up
            to the last token.
        first: The position of each array's first slot; 0 but for rings that have gone round.
        checkpoints: Recurrent states by ascending position; none where no layer has one.
        pinned: Position of the one at the last prompt's end.
        reached: See `ModelState`.
    """

    tokens: list[int]
    is_quantized: bool
    slots: list[mx.array]
    first: list[int]
    checkpoints: list[Checkpoint]
    pinned: int
    reached: int


def image_of(state: ModelState, tokens: list[int], kept: int) -> StateImage:
    """Take an image of a state.

    Args:
        state: Its newest checkpoint stands where plain decoding would have left it.
        tokens: Every token it covers.
        kept: The earliest start of a tile that the image is to allow.
    """
    layers = state.layout.layer_of_each_array
    first = [layer.first_seen(kept) for layer in layers]
    slots = [
        mx.contiguous(layer.taken(array, begin, len(tokens)))
        for layer, array, begin in zip(layers, state.slots, first, strict=True)
    ]
    wanted = {state.position, state.pinned} - {0}
    checkpoints = [c for c in state.checkpoints if c.position in wanted and c.arrays]
    # Another thread could not compute them, and the next forward would copy what they are of.
    mx.eval(slots, [c.arrays for c in checkpoints])
    reached = max(state.reached, len(tokens))
    return StateImage(tokens, state.is_quantized, slots, first, checkpoints, state.pinned, reached)


def why_not(image: StateImage, layout: StateLayout) -> str | None:
    """Why an image is no state of this layout, or None if it is one."""
    layers, count = layout.layer_of_each_array, len(image.tokens)
    if len(image.slots) != len(layers):
        return f"it has {len(image.slots)} arrays of keys and values instead of {len(layers)}"
    for index, (layer, array, begin) in enumerate(
        zip(layers, image.slots, image.first, strict=True)
    ):
        shape = layout.shape_of_each_array[index]
        expected = (1, shape.heads, count - begin, shape.size)
        if array.shape != expected or array.dtype != shape.dtype or begin > layer.first_seen(count):
            return (
                f"its array {index} of keys and values is {array.dtype} {array.shape} from "
                f"position {begin} instead of {shape.dtype} {expected}"
            )
    recurrent = layout.recurrent_shapes
    for position, arrays in image.checkpoints:
        if not 0 < position <= count:
            return f"its recurrent state covers {position} of {count} tokens"
        if [(array.shape, array.dtype) for array in arrays] != recurrent:
            return f"its recurrent state after {position} tokens has other shapes or dtypes"
    return None


def put_image(state: ModelState, image: StateImage) -> None:
    """Make an empty state one of the image, which is one of its layout with room for its tokens."""
    state.is_empty = False
    state.layout = state.forms[1 if image.is_quantized else 0]
    state.slots = []
    state.checkpoints = list(image.checkpoints) or state.checkpoints
    state.pinned, state.reached = image.pinned, image.reached
    count = state.high_water = state.written = len(image.tokens)
    # Whoever wrote it may have read no row of it.
    state.non_finite_until = count
    layers = state.layout.layer_of_each_array
    for layer, array, begin in zip(layers, image.slots, image.first, strict=True):
        if isinstance(layer, RingLayer):
            held = min(array.shape[2], layer.rule.depth)
            array, begin = array[:, :, array.shape[2] - held :], count - held
            if begin:
                # What is not there counts as overwritten.
                state.high_water = max(state.high_water, begin + layer.rule.depth)
        state.slots.append(layer.laid(array, begin, state.capacity))
        mx.eval(state.slots[-1])
