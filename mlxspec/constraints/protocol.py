"""What constrains an output: which tokens may follow what was emitted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np


class TokenMatcher(Protocol):
    """How far one text has come in what constrains it; a new one knows no token yet.

    What it allows is a function of the tokens consumed and of nothing else: what was consumed and
    rolled back leaves no trace. Where it cannot tell it raises `GrammarError`, and another
    matcher takes its place.
    """

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [n]; ids from n on may not.

        End tokens may come where the text may end, and only they where it must. After an end
        token nothing may.
        """

    def consume(self, token: int) -> None:
        """The token comes next; it is one of those allowed."""

    def rollback(self, count: int) -> None:
        """The last `count` tokens did not come."""


@runtime_checkable
class Constraint(Protocol):
    """Makes matchers: one object serves any number of texts, one after the other or at once."""

    @property
    def end_tokens(self) -> Collection[int]:
        """Ids that end a text, and are allowed where it may end."""

    def matcher(self) -> TokenMatcher:
        """A matcher at the beginning of a text."""
