"""One engine serves one sequence: whoever comes second is told so instead of mixing two texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxspec.errors import EngineBusy

_ADVICE = "wait for it, or make an engine of your own: StaticShapeEngine(model)"


class Exclusive:
    """Guards the calls of an engine against each other, and its sequence against a second user.

    Args:
        what: How an error calls what is guarded.
        advice: What the second user can do.
    """

    def __init__(self, what: str = "this engine", advice: str = _ADVICE) -> None:
        self._what = what
        self._advice = advice
        self._call = _Place()
        self._sequence = _Place()
        self.call_count = 0

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run one state-changing call; another one at the same time raises `EngineBusy`."""
        with self._call.taken(f"{name}: another thread is inside {self._what}; {self._advice}"):
            self.call_count += 1
            yield

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the sequence from the first to the last token of a generation."""
        busy = f"{self._what} is generating for somebody else; {self._advice}"
        with self._sequence.taken(busy):
            yield

    @property
    def leased(self) -> bool:
        """Whether somebody holds the sequence now."""
        return self._sequence.is_taken


class _Place:
    """Room for one, which Ctrl-C cannot leave taken for good.

    Of a lock one does not know, where Ctrl-C arrives as it is acquired, whether it was. Here the
    taker is known by name. Both steps are single operations of a dictionary, and where the place
    is given up nothing is called: CPython looks for signals after calls. Where Ctrl-C arrives in
    the interpreter's own code around the block, the place is free once the exception is let go.
    """

    def __init__(self) -> None:
        self._taker: dict[None, object] = {}

    @property
    def is_taken(self) -> bool:
        """Whether somebody is there now."""
        return None in self._taker

    @contextmanager
    def taken(self, busy: str) -> Iterator[None]:
        """Be there inside the block, or raise `EngineBusy`, which says `busy`."""
        taker, me = self._taker, object()
        try:
            if taker.setdefault(None, me) is not me:
                raise EngineBusy(busy)
            yield
        finally:
            try:
                mine = taker[None] is me
            except KeyError:
                mine = False
            if mine:
                del taker[None]
