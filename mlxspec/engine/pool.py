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
    pools = model.__dict__.setdefault(_ATTRIBUTE, {})
    pool: list[Engine] = pools.setdefault(key, [])
    pool[:] = [engine for engine in pool if engine.leased or engine.weights_unchanged]
    for engine in pool:
        if not engine.leased:
            return engine
    engine = ENGINE_KINDS[kind](model, **options)
    pool.append(engine)
    return engine


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
