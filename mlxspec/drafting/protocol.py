"""What a decoder asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Drafter(Protocol):
    """Guesses the tokens that follow a history. A wrong guess costs time and nothing else."""

    def propose(self, history: Sequence[int], budget: int) -> Sequence[int]:
        """Guess what follows.

        Args:
            history: Every committed token so far, prompt and output, the newest last. A
                read-only view that is valid during the call.
            budget: Most tokens that can be used, 0 or more; a longer guess is cut.

        Returns:
            At most `budget` token ids of the target, possibly none.
        """

    def commit(self, length: int) -> None:
        """The first `length` tokens of the history are final."""

    def reset(self) -> None:
        """A new sequence begins, which may share nothing with the last one."""
