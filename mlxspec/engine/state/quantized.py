"""Quantised full-attention layers: keys and values in a few bits, slot = position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.full import FullAttentionCache, FullAttentionLayer
from mlxspec.engine.state.slots import SlotLayer, SlotShape


@dataclass(frozen=True)
class KVQuantization:
    """How keys and values are quantised, with the names and meaning of mlx-lm's options.

    Attributes:
        bits: Bits of one number.
        group_size: Numbers that share a scale and a bias.
    """

    bits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"kv_bits: expected 2, 3, 4, 5, 6 or 8, got {self.bits!r}")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"kv_group_size: expected 32, 64 or 128, got {self.group_size!r}")

    def of(self, arrays: Iterable[mx.array]) -> list[mx.array]:
        """Keys and values as packed numbers, scales and biases of each: six arrays."""
        return [
            part
            for array in arrays
            for part in mx.quantize(array, group_size=self.group_size, bits=self.bits)
        ]


@dataclass(frozen=True)
class QuantizedAttentionLayer(SlotLayer):
    """One full-attention layer after its conversion; its arrays are those of `KVQuantization.of`.

    Every slot is quantised by itself, so a slot that is written again and a rewind mean what
    they mean without quantisation.
    """

    quantization: KVQuantization

    @staticmethod
    def of(layer: FullAttentionLayer, quantization: KVQuantization) -> QuantizedAttentionLayer:
        """What a full-attention layer becomes."""
        shapes = tuple(SlotShape.of(part) for part in quantization.of(layer.zeros(1)))
        return QuantizedAttentionLayer(shapes, quantization)

    def bind(self, arrays: list[mx.array], frame: TileFrame) -> QuantizedAttentionCache:
        """A cache for mlx-lm's model over these arrays."""
        return QuantizedAttentionCache(arrays, frame, self.quantization)


class QuantizedAttentionCache(FullAttentionCache):
    """mlx-lm's interface of a quantised cache, for the length of one trace.

    Attributes:
        bits: Bits of one number; that there is such an attribute makes mlx-lm's attention take
            quantised keys and values.
        group_size: Numbers that share a scale.
    """

    def __init__(self, arrays: list[mx.array], frame: TileFrame, quantization: KVQuantization):
        super().__init__(arrays, frame)
        self.bits = quantization.bits
        self.group_size = quantization.group_size
        self._quantization = quantization

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Quantise and write the rows [1, heads, width, size]; return the first `span` slots."""
        self._write(self._quantization.of([keys, values]))
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        """(packed numbers, scales, biases) of the keys, and the same of the values."""
        seen = self._seen
        return tuple(seen[:3]), tuple(seen[3:])
