"""Drafts under a constraint: cut where it forbids a token, extended where it forces one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlxspec.constraints.lookahead import Lookahead
from mlxspec.decoding.target import TargetChoice
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.proposals import checked_proposal
from mlxspec.drafting.protocol import BudgetOf, Drafter, TargetedDrafter, budget_for, source_of
from mlxspec.engine.tokens import TokenView, token_ids


class ConstrainedDrafter:
    """Implements `ForcingDrafter` and `TargetedDrafter` around another drafter, if there is one.

    What is forced is certain, so the other drafter is asked for what follows it: its guess is
    then checked in the same forward. What is forced after its guess extends the guess.

    Args:
        drafter: The other one.
        lookahead: Where the text stands; the acceptance tells it what is emitted.
    """

    def __init__(self, drafter: Drafter | None, lookahead: Lookahead):
        self._drafter = drafter
        self._lookahead = lookahead
        self.budget_of: BudgetOf | None = None
        # What is certain in this round, until a guess is asked for.
        self._certain: list[int] | None = None
        # What the other drafter was shown beyond the history, and where it began.
        self._shown: tuple[int, list[int]] = (0, [])
        # The longest text that its last proposal can have been accepted into, if there is one.
        self._longest: int | None = None

    @property
    def source(self) -> tuple[str, int]:
        """The other drafter's source."""
        return ("grammar", 0) if self._drafter is None else source_of(self._drafter)

    @property
    def forward_count(self) -> int:
        """Those of the other drafter."""
        return 0 if self._targeted is None else self._targeted.forward_count

    @property
    def note(self) -> str | None:
        """That of the other drafter."""
        return getattr(self._targeted, "note", None)

    def certain(self, most: int) -> list[int]:
        """See `ForcingDrafter`."""
        self._lookahead.restart()
        self._certain = self._lookahead.go_where_forced(most)
        return self._certain[:]

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """See `Drafter.propose`: the other drafter's guess as far as it is allowed."""
        certain, self._certain = self._certain, None
        if certain is None:
            self._lookahead.restart()
            certain = []
        draft: list[int] = []
        if self._drafter is not None:
            begin, shown = self._shown
            if list(history[begin : begin + len(shown)]) != shown:
                # The text was left before these tokens came.
                self._drafter.reset()
            self._shown = (len(history) - len(certain), certain)
            asked = budget_for(self._drafter, history, budget, self.budget_of)
            guess = checked_proposal(
                self._drafter, TokenView(history), asked, self._lookahead.vocab_size
            )
            if isinstance(guess, DeviceDraft):
                # Where the grammar cuts it, the host decides.
                guess = token_ids(guess.tokens, self._lookahead.vocab_size, "draft")
            draft = guess[: self._lookahead.go_along(guess)]
            self._longest = len(history) + len(draft) + 1
        return draft + self._lookahead.go_where_forced(budget - len(draft))

    def commit(self, length: int) -> None:
        """See `Drafter.commit`: what was forced after the other drafter's guess is not its own."""
        if self._drafter is not None:
            longest, self._longest = self._longest, None
            self._drafter.commit(length if longest is None else min(length, longest))

    def reset(self) -> None:
        """See `Drafter.reset`."""
        self._certain = None
        self._shown = (0, [])
        self._longest = None
        if self._drafter is not None:
            self._drafter.reset()

    def require_vocabulary(self, vocab_size: int, tokenizer: Any) -> None:
        """See `TargetedDrafter`."""
        if self._targeted is not None:
            self._targeted.require_vocabulary(vocab_size, tokenizer)

    def lease(self) -> AbstractContextManager[None]:
        """Hold the other drafter."""
        return nullcontext() if self._targeted is None else self._targeted.lease()

    def begin(self, prompt: Sequence[int], target: TargetChoice) -> None:
        """Tell the other drafter."""
        if self._targeted is not None:
            self._targeted.begin(prompt, target)

    @property
    def _targeted(self) -> TargetedDrafter | None:
        return self._drafter if isinstance(self._drafter, TargetedDrafter) else None
