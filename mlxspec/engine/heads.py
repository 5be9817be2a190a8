"""Logits before the final soft cap, for the families that have one: the scan applies it itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxspec.engine.support import family_of


class RawHead(NamedTuple):
    """A model up to its raw logits.

    Attributes:
        forward: Takes (tokens [1, width], cache=caches), returns logits [1, width, vocab].
        cap: What the model caps them with, as `LogitRowScan` takes it; None if it does not.
    """

    forward: Callable[..., mx.array]
    cap: float | None


def raw_head(model: nn.Module) -> RawHead:
    """The model without its final soft cap, sharing every weight with it.

    Families without a final cap, or whose cap is part of a forward that cannot be cut there, come
    back as they are.
    """
    family = family_of(model)
    if family == "gemma2":

        def uncapped(tokens: mx.array, cache: list[Any]) -> mx.array:
            return model.model.embed_tokens.as_linear(model.model(tokens, cache))

        return RawHead(uncapped, model.final_logit_softcapping)
    path = {
        "gemma3n": ("model", "language_model"),
        "gemma4": ("language_model",),
        "gemma4_text": (),
    }.get(family)
    if path is None:
        return RawHead(model, None)
    owner = model
    for name in path:
        owner = getattr(owner, name)
    cap = owner.final_logit_softcapping
    return RawHead(model, None) if cap is None else RawHead(_without_cap(model, path), cap)


def _without_cap(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    """A shallow copy, down the path, of the modules whose last one caps; the original stays."""
    twin = copy.copy(module)
    if path:
        setattr(twin, path[0], _without_cap(getattr(module, path[0]), path[1:]))
    else:
        twin.final_logit_softcapping = None
    return twin
