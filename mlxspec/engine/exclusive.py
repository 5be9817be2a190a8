"""One engine serves one sequence: whoever comes second is told so instead of mixing two texts."""

from __future__ import annotations

import threading
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
        self._call = threading.Lock()
        self._sequence = threading.Lock()
        self.call_count = 0

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run one state-changing call; another one at the same time raises `EngineBusy`."""
        if not self._call.acquire(blocking=False):
            raise EngineBusy(f"{name}: another thread is inside {self._what}; {self._advice}")
        self.call_count += 1
        try:
            yield
        finally:
            self._call.release()

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the sequence from the first to the last token of a generation."""
        if not self._sequence.acquire(blocking=False):
            raise EngineBusy(f"{self._what} is generating for somebody else; {self._advice}")
        try:
            yield
        finally:
            self._sequence.release()

    @property
    def leased(self) -> bool:
        """Whether somebody holds the sequence now."""
        return self._sequence.locked()
