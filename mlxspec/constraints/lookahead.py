"""A matcher that is stepped along a draft and comes back: the draft's end, the rows' masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxspec.constraints.protocol import Constraint, TokenMatcher
from mlxspec.errors import GrammarError


class Lookahead:
    """Where one text stands in its constraint, and what would be allowed along a guess.

    The matcher has consumed every emitted token and, for the time of a round, guessed ones. What
    it allowed at every step is kept, so that a guess that was looked along when it was made costs
    nothing when its rows are masked or its tokens are emitted. A guess that the matcher fails at
    ends there: only what is emitted may end a text.

    Args:
        constraint: Makes the matcher.
        vocab_size: Entries in a row of logits, which may be more or fewer than the tokenizer's.
    """

    def __init__(self, constraint: Constraint, vocab_size: int):
        self._constraint = constraint
        self.vocab_size = vocab_size
        self.begin()

    def begin(self) -> None:
        """A new text begins."""
        self._matcher: TokenMatcher = self._constraint.matcher()
        self._emitted: list[int] = []
        self._ahead: list[int] = []
        # One row per state met so far, the first of what is emitted; the last may be missing.
        self._rows: list[np.ndarray] = []

    def allowed(self) -> np.ndarray:
        """Which tokens may follow what is emitted, bool [vocab]."""
        return self._rows[0] if self._ahead else self._row()

    def restart(self) -> None:
        """Go back to what is emitted."""
        self._retreat(0)

    def go_along(self, tokens: Sequence[int]) -> int:
        """Go on along these as far as they are allowed; says how many are.

        Raises:
            GrammarError: What may follow what is emitted cannot be told.
        """
        for count, token in enumerate(tokens):
            if not self._row()[token]:
                return count
            try:
                self._matcher.consume(token)
                self._ahead.append(token)
                self._row()
            except GrammarError:
                del self._ahead[len(self._rows) - 1 :]
                self._replay()
                return count
        return len(tokens)

    def go_where_forced(self, most: int) -> list[int]:
        """Go on as long as one token alone is allowed, at most so many; says which they are."""
        forced: list[int] = []
        while len(forced) < most:
            row = self._row()
            if np.count_nonzero(row) != 1:
                break
            token = int(row.argmax())
            if not self.go_along([token]):
                break
            forced.append(token)
        return forced

    def rows_along(self, draft: Sequence[int]) -> np.ndarray:
        """What is allowed after what is emitted and after every draft token, bool [k + 1, vocab].

        After a token that is not allowed, nothing is.
        """
        same = 0
        while same < min(len(draft), len(self._ahead)) and draft[same] == self._ahead[same]:
            same += 1
        self._retreat(same)
        self.go_along(draft[same:])
        self._row()
        rows = np.zeros((len(draft) + 1, self.vocab_size), bool)
        rows[: len(self._rows)] = self._rows
        return rows

    def emit(self, token: int) -> None:
        """The token is emitted; it is one of those allowed."""
        if self._ahead and self._ahead[0] == token:
            del self._ahead[0], self._rows[0]
        else:
            self._retreat(0)
            self._matcher.consume(token)
            self._rows.clear()
        self._emitted.append(token)

    def _row(self) -> np.ndarray:
        """What is allowed at the state the matcher is in."""
        if len(self._rows) == len(self._ahead):
            known = self._matcher.allowed()[: self.vocab_size]
            row = np.zeros(self.vocab_size, bool)
            row[: len(known)] = known
            self._rows.append(row)
        return self._rows[-1]

    def _replay(self) -> None:
        """Go on with a new matcher: one that has failed is not to be trusted any more.

        It is asked all that the old one was: llguidance fails where it was asked, not where it
        was not.
        """
        self._matcher = self._constraint.matcher()
        for token in (*self._emitted, *self._ahead):
            self._matcher.allowed()
            self._matcher.consume(token)
        self._matcher.allowed()

    def _retreat(self, to: int) -> None:
        """Take back the guessed tokens but for the first `to`."""
        if to < len(self._ahead):
            count = len(self._ahead) - to
            del self._ahead[to:]
            del self._rows[to + 1 :]
            try:
                self._matcher.rollback(count)
            except GrammarError:
                self._replay()
