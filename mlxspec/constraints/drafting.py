"""Drafts under a constraint: cut where it forbids a token, extended where it forces one."""

from __future__ import annotations

from collections.abc import Sequence

from mlxspec.constraints.lookahead import Lookahead
from mlxspec.decoding.decoder import checked_proposal
from mlxspec.drafting import Drafter
from mlxspec.engine.tokens import TokenView


class ConstrainedDrafter:
    """Implements `Drafter`: what is forced, then another drafter's guess, then what is forced.

    The other drafter is asked for what follows the forced tokens: they are as certain as those
    committed, and its guess is then checked in the same forward.

    Args:
        drafter: The other one, if there is one.
        lookahead: Where the text stands; the acceptance tells it what is emitted.
    """

    def __init__(self, drafter: Drafter | None, lookahead: Lookahead):
        self._drafter = drafter
        self._lookahead = lookahead
        self._guessed = False
        # What the other drafter was shown beyond the history, and where it began.
        self._shown: tuple[int, list[int]] = (0, [])

    @property
    def source(self) -> tuple[str, int]:
        """What the last proposal came from: the other drafter's source where it had a say."""
        if self._guessed:
            default = (type(self._drafter).__name__, 0)
            found: tuple[str, int] = getattr(self._drafter, "source", default)
            return found
        return "grammar", 0

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """See `Drafter.propose`."""
        self._lookahead.restart()
        draft = self._lookahead.go_where_forced(budget)
        self._guessed = False
        if self._drafter is not None:
            begin, shown = self._shown
            if list(history[begin : begin + len(shown)]) != shown:
                # The text was left before these tokens came.
                self._drafter.reset()
            self._shown = (len(history), draft[:])
            seen = TokenView(history)
            for token in draft:
                seen = TokenView(seen, last=token)
            guess = checked_proposal(
                self._drafter, seen, budget - len(draft), self._lookahead.vocab_size
            )
            allowed = guess[: self._lookahead.go_along(guess)]
            self._guessed = bool(allowed)
            draft += allowed
        return draft + self._lookahead.go_where_forced(budget - len(draft))

    def commit(self, length: int) -> None:
        """See `Drafter.commit`."""
        if self._drafter is not None:
            self._drafter.commit(length)

    def reset(self) -> None:
        """See `Drafter.reset`."""
        self._guessed = False
        self._shown = (0, [])
        if self._drafter is not None:
            self._drafter.reset()
