"""One engine serves one sequence: whoever comes second is told so instead of mixing two texts.

Of a lock one does not know, where Ctrl-C arrives as it is acquired, whether it was. So a place is
a dictionary here that holds its taker: to take it is one operation, and to give it up calls
nothing, since CPython looks for signals after calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from mlxspec.errors import EngineBusy

_ADVICE = "wait for it, or make an engine of your own: StaticShapeEngine(model)"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Caller:
    """Who is inside a call: its thread, and which method it called."""

    thread: int
    method: str


class Exclusive:
    """Guards the calls of an engine against each other, and its sequence against a second user.

    Args:
        what: How an error calls what is guarded.
        advice: What the second user can do.

    Attributes:
        caller: Who is inside a call.
        call_count: Calls so far.
    """

    def __init__(self, what: str = "this engine", advice: str = _ADVICE) -> None:
        self.what = what
        self.advice = advice
        self.caller: dict[None, Caller] = {}
        self._holder: dict[None, object] = {}
        self.call_count = 0

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the sequence from the first to the last token of a generation.

        Where Ctrl-C arrives in the interpreter's own code around the block, it is free again once
        the exception is let go.
        """
        holder, me = self._holder, object()
        try:
            if holder.setdefault(None, me) is not me:
                raise EngineBusy(f"{self.what} is generating for somebody else; {self.advice}")
            yield
        finally:
            try:
                mine = holder[None] is me
            except KeyError:
                mine = False
            if mine:
                del holder[None]

    @property
    def leased(self) -> bool:
        """Whether somebody holds the sequence now."""
        return None in self._holder


def one_call(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that changes an engine's state: another one meanwhile raises `EngineBusy`.

    The engine has an `Exclusive` for it, `_exclusive`.
    """
    name = method.__name__

    @wraps(method)
    def guarded(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        exclusive: Exclusive = engine._exclusive
        caller, me = exclusive.caller, Caller(get_ident(), name)
        try:
            inside = caller.setdefault(None, me)
            if inside is not me:
                if inside.thread == me.thread:
                    raise EngineBusy(
                        f"{name}: called from inside {inside.method} of {exclusive.what}, which "
                        "has not come to its end; call it when that one has returned"
                    )
                raise EngineBusy(
                    f"{name}: another thread is inside {exclusive.what}; {exclusive.advice}"
                )
            exclusive.call_count += 1
            return method(engine, *args, **kwargs)
        finally:
            try:
                mine = caller[None] is me
            except KeyError:
                mine = False
            if mine:
                del caller[None]

    return guarded
