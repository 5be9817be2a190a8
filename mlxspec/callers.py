"""Objects from callers: what will be called is looked at when it comes, not when it is needed."""

from __future__ import annotations

from typing import Any

from mlxspec.engine.protocol import SpeculativeEngine

_DRAFTER_METHODS = ("propose", "commit", "reset")


def require_callable(name: str, value: Any, arguments: str) -> None:
    """Refuse what is no function.

    Args:
        name: How the message calls it.
        value: What came.
        arguments: What it will be called with, for the message.

    Raises:
        ValueError: It cannot be called.
    """
    if not callable(value):
        raise ValueError(f"{name}: expected a function of {arguments}, got {value!r}")


def require_text(name: str, value: Any) -> None:
    """Refuse what no tokenizer takes.

    Args:
        name: How the message calls it.
        value: What came.

    Raises:
        ValueError: It is no string, or has halves of characters, which are no text in UTF-8.
    """
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ValueError(f"{name}: expected text that UTF-8 can say, got {value!r}") from None


def require_engine(engine: Any) -> None:
    """Refuse what is no engine.

    Raises:
        ValueError: It is a class instead of an object, or lacks what an engine has.
    """
    if isinstance(engine, type) or not isinstance(engine, SpeculativeEngine):
        raise ValueError(
            "engine: expected 'static', 'dynamic' or an engine such as StaticShapeEngine(model), "
            f"got {engine!r}"
        )


def require_drafter(drafter: Any) -> None:
    """Refuse what lacks a drafter's methods.

    Raises:
        ValueError: It is a class instead of an object, or a method is missing.
    """
    if isinstance(drafter, type):
        raise ValueError(
            f"drafter: expected an object, got the class {drafter.__name__}; make one: "
            f"{drafter.__name__}(...)"
        )
    missing = [name for name in _DRAFTER_METHODS if not callable(getattr(drafter, name, None))]
    if missing:
        raise ValueError(
            "drafter: expected an object with propose(history, budget), commit(length) and "
            f"reset(), got {drafter!r}, which lacks {' and '.join(missing)}"
        )
