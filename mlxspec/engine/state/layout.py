"""The state of a whole model: which arrays its layers have, and the caches bound over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.full import FullAttentionLayer
from mlxspec.engine.state.quantized import KVQuantization, QuantizedAttentionLayer
from mlxspec.engine.state.recurrent import RecurrentLayer
from mlxspec.engine.state.ring import RingLayer, RingRule
from mlxspec.engine.state.slots import SlotLayer, SlotShape

Layer = (
    FullAttentionLayer | QuantizedAttentionLayer | RingLayer | RecurrentLayer | tuple["Layer", ...]
)


def layer_kind(cache: Any) -> str:
    """How a person calls a layer with this cache of mlx-lm; the ones a layout takes are first."""
    if type(cache) is KVCache:
        return "full attention"
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return "sliding window"
    if type(cache) is ArraysCache:
        return "recurrent"
    if type(cache) is CacheList:
        return " + ".join(layer_kind(part) for part in cache.caches)
    return f"a {type(cache).__name__}"


def foreign_kinds(caches: Sequence[Any]) -> list[str]:
    """The kinds among these caches of mlx-lm that no layout takes, each once."""
    known = {"full attention", "sliding window", "recurrent"}
    kinds = {kind for cache in caches for kind in layer_kind(cache).split(" + ")}
    return sorted(kinds - known)


@dataclass(frozen=True)
class StateLayout:
    """The layers of a model in the order of its caches.

    Slots (keys and values) are written in place and consumed by every forward; recurrent states
    are small, and a forward leaves the old ones alone, so that they can serve as checkpoints.
    """

    layers: tuple[Layer, ...]

    @staticmethod
    def of(caches: Sequence[Any], widest_tile: int) -> StateLayout:
        """Read off mlx-lm's caches after one token.

        Args:
            caches: What `make_prompt_cache` gave and a forward filled.
            widest_tile: Rows of the widest decode tile.
        """

        def layer(cache: Any) -> Layer:
            if isinstance(cache, CacheList):
                return tuple(layer(part) for part in cache.caches)
            if isinstance(cache, ArraysCache):
                return RecurrentLayer.of(cache)
            if isinstance(cache, RotatingKVCache):
                return RingLayer.of(cache, widest_tile)
            return FullAttentionLayer.of(cache)

        return StateLayout(tuple(layer(cache) for cache in caches))

    def before_first_token(self) -> StateLayout:
        """The layout of a tile at 0 whose recurrent layers are given no state."""

        def without(layer: Layer) -> Layer:
            if isinstance(layer, tuple):
                return tuple(without(part) for part in layer)
            return replace(layer, given=False) if isinstance(layer, RecurrentLayer) else layer

        return StateLayout(tuple(without(layer) for layer in self.layers))

    def quantized(self, quantization: KVQuantization) -> StateLayout:
        """The layout after the conversion.

        mlx-lm converts the caches in its list that can be converted: full attention, but not
        what stands inside a `CacheList`. So does this.
        """
        return StateLayout(
            tuple(
                QuantizedAttentionLayer.of(layer, quantization)
                if isinstance(layer, FullAttentionLayer)
                else layer
                for layer in self.layers
            )
        )

    @property
    def rings(self) -> frozenset[RingRule]:
        """The rules of all rings; empty where no layer has a window."""
        return frozenset(layer.rule for layer in self._slot_layers if isinstance(layer, RingLayer))

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a recurrent or convolutional state."""
        return any(isinstance(layer, RecurrentLayer) for layer in _leaves(self.layers))

    def zero_slots(self, capacity: int) -> list[mx.array]:
        """Keys and values of an empty state, with room for `capacity` tokens."""
        return [array for layer in self._slot_layers for array in layer.zeros(capacity)]

    def zero_recurrent(self) -> list[mx.array]:
        """The recurrent states before the first token."""
        leaves = _leaves(self.layers)
        return [
            array for leaf in leaves if isinstance(leaf, RecurrentLayer) for array in leaf.zeros()
        ]

    def grow(self, slots: list[mx.array], capacity: int) -> None:
        """Give every array of slots room for `capacity` tokens, in place in the list.

        One array is copied at a time, so the peak is one array more, not one state more. If there
        is no memory for one of them, those before it have their room already.
        """
        for index, layer in enumerate(self.layer_of_each_array):
            grown = layer.grow(slots[index], capacity)
            if grown is not slots[index]:
                # There may be no memory for it, and then there is still the old one.
                mx.eval(grown)
                slots[index] = grown

    def clear(self, slots: list[mx.array], begin: int, end: int, high_water: int) -> None:
        """Zero what was written of the slots of positions begin..end-1, in place in the list.

        Args:
            slots: The slot layers' arrays.
            begin: First position.
            end: One past the last.
            high_water: The rings'.
        """
        for index, layer in enumerate(self.layer_of_each_array):
            layer_end = layer.held_until(slots[index], end, high_water)
            if begin < layer_end:
                slots[index] = layer.clear(slots[index], begin, layer_end)
        mx.eval(slots)

    def convert(self, slots: list[mx.array], quantized: StateLayout) -> list[mx.array]:
        """The slots in the form that `quantized`, which came of this layout, gives them."""
        converted: list[mx.array] = []
        arrays = iter(slots)
        for layer, form in zip(self._slot_layers, quantized._slot_layers, strict=True):
            parts = [next(arrays) for _ in layer.shapes]
            if isinstance(form, QuantizedAttentionLayer):
                parts = form.quantization.of(parts)
                mx.eval(parts)
            converted += parts
        return converted

    def ring_slots(self, slots: list[mx.array]) -> dict[int, mx.array]:
        """Those of the slots that belong to rings, by their index."""
        return {
            index: slots[index]
            for index, layer in enumerate(self.layer_of_each_array)
            if isinstance(layer, RingLayer)
        }

    def bind(self, slots: list[mx.array], recurrent: list[mx.array], frame: TileFrame) -> list[Any]:
        """Caches for mlx-lm's model over these arrays."""
        slot_arrays, recurrent_arrays = iter(slots), iter(recurrent)

        def cache(layer: Layer) -> Any:
            if isinstance(layer, tuple):
                return [cache(part) for part in layer]
            if isinstance(layer, RecurrentLayer):
                arrays = [next(recurrent_arrays) for _ in range(layer.input_count)]
                return layer.bind(arrays, frame)
            return layer.bind([next(slot_arrays) for _ in layer.shapes], frame)

        return [cache(layer) for layer in self.layers]

    def collect(self, caches: list[Any]) -> tuple[list[mx.array], list[mx.array]]:
        """Slots and recurrent states as a forward left them in its caches."""
        slots: list[mx.array] = []
        recurrent: list[mx.array] = []
        for layer, cache in zip(_leaves(self.layers), _leaves(caches), strict=True):
            (recurrent if isinstance(layer, RecurrentLayer) else slots).extend(cache.arrays)
        return slots, recurrent

    @property
    def _slot_layers(self) -> list[SlotLayer]:
        return [leaf for leaf in _leaves(self.layers) if not isinstance(leaf, RecurrentLayer)]

    @property
    def layer_of_each_array(self) -> list[SlotLayer]:
        """The layer that each array of slots belongs to."""
        return [layer for layer in self._slot_layers for _ in layer.shapes]

    @property
    def shape_of_each_array(self) -> list[SlotShape]:
        """Heads, size and dtype of each array of slots."""
        return [shape for layer in self._slot_layers for shape in layer.shapes]

    @property
    def recurrent_shapes(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shape and dtype of each array of the recurrent states."""
        leaves = _leaves(self.layers)
        return [
            shape for leaf in leaves if isinstance(leaf, RecurrentLayer) for shape in leaf.shapes
        ]


def _leaves(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, tuple | list):
            yield from _leaves(item)
        else:
            yield item
