"""Engines kept with their model, so that a second generation does not trace again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


class _Kept(list[tuple[object, Engine]]):
    """A model's engines. A deep copy or a pickle of the model has none: they run the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


# Engines nobody uses that are kept per model, the latest used last: each holds a state.
_KEPT_FREE = 4
# One thread at a time looks through a model's engines.
_CHOOSING = threading.RLock()


def new_engine(model: nn.Module, kind: str = "static", **options: Any) -> Engine:
    """An engine that is its caller's own.

    Args:
        model: A model of mlx-lm.
        kind: "static" or "dynamic".
        **options: Keyword arguments of the engine's class.

    Raises:
        UnsupportedModel: The static engine cannot take the model.
        ValueError: An unknown kind, or an option out of range.
    """
    if kind not in ENGINE_KINDS:
        raise ValueError(f"engine: expected 'static' or 'dynamic', got {kind!r}")
    return ENGINE_KINDS[kind](model, **options)


def engine_for(
    model: nn.Module, kind: str = "static", *, role: str = "target", **options: Any
) -> Engine:
    """An engine of this model and these options that nobody is generating with.

    Args:
        model: A model of mlx-lm.
        kind: "static" or "dynamic".
        role: What the engine is for: those of one role trace the same graphs, so a model that
            drafts for itself finds each of its two engines again.
        **options: Keyword arguments of the engine's class; None means its default.

    Returns:
        A kept engine, or a new one where every kept one is in use. Its history is whatever its
        last user left.

    Raises:
        UnsupportedModel: The static engine cannot take the model.
        ValueError: An unknown kind, or an option out of range.
    """
    options = {name: value for name, value in options.items() if value is not None}
    key = (role, kind, tuple(sorted((name, _hashable(value)) for name, value in options.items())))
    with _CHOOSING:
        kept: _Kept = model.__dict__.setdefault(_ATTRIBUTE, _Kept())
        kept[:] = [entry for entry in kept if entry[1].leased or entry[1].weights_unchanged]
        # A shallow copy shares the list, and is another model.
        own = (entry for entry in reversed(kept) if entry[0] == key and entry[1].model is model)
        entry = next((entry for entry in own if not entry[1].leased), None)
        if entry is None:
            entry = (key, new_engine(model, kind, **options))
        else:
            kept.remove(entry)
        kept.append(entry)
        free = [e for e in kept if not e[1].leased]
        for oldest in free[:-_KEPT_FREE]:
            kept.remove(oldest)
        return entry[1]


@contextmanager
def borrowed_engine(model: nn.Module, kind: str = "static", **options: Any) -> Iterator[Engine]:
    """An engine as `engine_for` finds it, held meanwhile: nobody else is given the same one."""
    with ExitStack() as held:
        with _CHOOSING:
            engine = engine_for(model, kind, **options)
            held.enter_context(engine.lease())
        yield engine


def keep_instead(old: Engine, new: Engine) -> None:
    """Keep an engine in the place of another that was kept for the same options."""
    kept: _Kept = old.model.__dict__.get(_ATTRIBUTE, _Kept())
    kept[:] = [(key, new if engine is old else engine) for key, engine in kept]


def forget_engines(model: nn.Module) -> None:
    """Let go of the engines kept with a model, and of the memory of their states.

    Needed only after weights were changed in place (`weight *= 2`), which cannot be noticed: the
    graphs of an engine hold the weights as constants. New arrays in their place are noticed.
    """
    model.__dict__.pop(_ATTRIBUTE, None)


def _hashable(value: Any) -> Any:
    """True and 1 are equal and not the same request, so the kind is part of it."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return type(value).__name__, value
