"""Engines kept with their model, so that a second generation does not trace again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import mlx.nn as nn

from mlxspec.engine.dynamic import DynamicShapeEngine
from mlxspec.engine.static import StaticShapeEngine

Engine = StaticShapeEngine | DynamicShapeEngine
EngineKind = Literal["static", "dynamic"]

ENGINE_KINDS: dict[str, Callable[..., Engine]] = {
    "static": StaticShapeEngine,
    "dynamic": DynamicShapeEngine,
}
# The engines hang on the model itself, so that both are freed together.
_ATTRIBUTE = "_mlxspec_engines"
# Engines nobody uses that are kept per model, the latest used last: each holds a state.
_KEPT_FREE = 4


def engine_for(model: nn.Module, kind: str = "static", **options: Any) -> Engine:
    """An engine of this model and these options that nobody is generating with.

    Args:
        model: A model of mlx-lm.
        kind: "static" or "dynamic".
        **options: Keyword arguments of the engine's class; None means its default.

    Returns:
        A kept engine, or a new one where every kept one is in use. Its history is whatever its
        last user left.

    Raises:
        UnsupportedModel: The static engine cannot take the model.
        ValueError: An unknown kind, or an option out of range.
    """
    if kind not in ENGINE_KINDS:
        raise ValueError(f"engine: expected 'static' or 'dynamic', got {kind!r}")
    options = {name: value for name, value in options.items() if value is not None}
    key = (kind, tuple(sorted((name, _hashable(value)) for name, value in options.items())))
    kept: list[tuple[object, Engine]] = model.__dict__.setdefault(_ATTRIBUTE, [])
    kept[:] = [entry for entry in kept if entry[1].leased or entry[1].weights_unchanged]
    entry = next((e for e in reversed(kept) if e[0] == key and not e[1].leased), None)
    if entry is None:
        entry = (key, ENGINE_KINDS[kind](model, **options))
    else:
        kept.remove(entry)
    kept.append(entry)
    free = [e for e in kept if not e[1].leased]
    for oldest in free[:-_KEPT_FREE]:
        kept.remove(oldest)
    return entry[1]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
