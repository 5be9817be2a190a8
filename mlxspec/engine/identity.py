"""Whether two models are the same one: what a saved state must not outlive."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.engine.support import family_of

_SAMPLES = 16


@dataclass(frozen=True)
class ModelIdentity:
    """A model in four short texts, from the cheapest to learn to the dearest.

    Attributes:
        family: The module of mlx-lm that defines it.
        config: Hash of its arguments; a model without weights has it too.
        structure: Hash of the names, shapes and dtypes of its weights, so of its quantisation.
        weights: Hash of every weight's sum and of some of its numbers. Two models of one structure
            differ in it unless they were made to have the same sums and samples.
    """

    family: str
    config: str
    structure: str
    weights: str

    def difference(self, other: ModelIdentity) -> str | None:
        """The first thing in which another model differs, in words, or None."""
        words = {
            "family": f"a model of the family {self.family}, and this is one of {other.family}",
            "config": "a model with another config",
            "structure": "a model whose weights have other shapes, or are quantised otherwise",
            "weights": "a model with other weights",
        }
        for field in fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return words[field.name]
        return None

    def as_dict(self) -> dict[str, str]:
        """The four texts by their names."""
        return asdict(self)


def identity_of(model: nn.Module) -> ModelIdentity:
    """Read off a model; every weight is read once."""
    flat: Any = tree_flatten(model.parameters())
    weights = sorted(flat)
    structure = "".join(f"{name}{array.shape}{array.dtype}" for name, array in weights)
    figures = [figure for _, array in weights for figure in (_sum(array), _samples(array))]
    mx.eval(figures)
    contents = hashlib.sha256()
    for figure in figures:
        contents.update(raw_bytes(figure))
    return ModelIdentity(
        family_of(model), config_hash(model), _hash(structure), contents.hexdigest()
    )


def config_hash(model: nn.Module) -> str:
    """Hash of a model's arguments; its weights may be missing."""
    return _hash(repr(getattr(model, "args", None)))


def raw_bytes(array: mx.array) -> bytes:
    """The numbers of an array of any dtype, row by row, as they lie in memory."""
    flat: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
    return bytes(memoryview(flat))


def _sum(array: mx.array) -> mx.array:
    """Sum of the bits as whole numbers modulo 2**32, the same in every order."""
    flat = mx.contiguous(array).reshape(-1)
    size = flat.dtype.size * flat.size
    words = flat.view(mx.uint32) if size % 4 == 0 and size else flat.view(mx.uint8)
    return mx.sum(words.astype(mx.uint32)).reshape(1)


def _samples(array: mx.array) -> mx.array:
    """The bytes of some numbers at equal distances."""
    flat = array.reshape(-1)
    count = min(_SAMPLES, flat.size)
    at = mx.array([i * (flat.size - 1) // max(1, count - 1) for i in range(count)], mx.uint32)
    return flat[at].view(mx.uint8)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
