"""Ctrl-C at a chosen line of the code under test."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_POP_EXCEPT = dis.opmap["POP_EXCEPT"]


class Interruptions:
    """Raises KeyboardInterrupt where code runs, with all that is under way on the device done.

    Args:
        inside: Says of a file's path whether its code is interrupted.
        moments: After so many lines, and after so many more; none counts lines.
        functions: Interrupt and count where functions begin, too.
        device_done: Computes what is under way.

    Attributes:
        lines: How many lines have run since the last interruption, while moments are left to come
            or none was given.
        left: Moments that have not come.
    """

    def __init__(
        self,
        inside: Callable[[str], bool],
        moments: Iterable[int] = (),
        *,
        functions: bool = False,
        device_done: Callable[[], Any] = lambda: None,
    ):
        self.left = list(moments)
        self.lines = 0
        self._inside = inside
        self._events = ("call", "line") if functions else ("line",)
        self._device_done = device_done

    def __enter__(self) -> Interruptions:
        self._usual = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._traced_again)
        sys.settrace(self._traced)
        return self

    def __exit__(self, *problem: object) -> None:
        sys.settrace(self._usual[0])
        sys.setprofile(self._usual[1])

    def _traced_again(self, frame: FrameType, event: str, argument: object) -> None:
        """CPython traces no further where a trace function raised; it goes on here."""
        if self.left and sys.gettrace() is None and frame.f_code.co_filename != __file__:
            sys.settrace(self._traced)

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._inside(frame.f_code.co_filename):
            return None
        if event in self._events:
            self.lines += 1
            if self.left and self.lines >= self.left[0] and not _leaves_a_handler(frame):
                self.lines = 0
                del self.left[0]
                self._device_done()
                raise KeyboardInterrupt
        return self._traced


def _leaves_a_handler(frame: FrameType) -> bool:
    """Whether an exception is about to be handled no more.

    No signal arrives there, and CPython would take it for handled ever after.
    """
    return frame.f_code.co_code[frame.f_lasti] == _POP_EXCEPT
