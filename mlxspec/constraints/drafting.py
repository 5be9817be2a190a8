"""Drafts under a constraint: cut where it forbids a token, extended where it forces one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlxspec.constraints.lookahead import Lookahead
from mlxspec.decoding.decoder import checked_proposal
from mlxspec.decoding.target import TargetChoice
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.protocol import Drafter, TargetedDrafter, budget_for, source_of
from mlxspec.engine.tokens import TokenView, token_ids


class ConstrainedDrafter:
    """Implements `TargetedDrafter`: what is forced, another drafter's guess, what is forced then.

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
        self.budget_of: Callable[[str], int] | None = None
        # What the other drafter was shown beyond the history, and where it began.
        self._shown: tuple[int, list[int]] = (0, [])
        # The longest text that its last proposal can have been accepted into, if there is one.
        self._longest: int | None = None

    @property
    def source(self) -> tuple[str, int]:
        """What the last proposal came from: the other drafter's source where it had a say."""
        if self._guessed:
            assert self._drafter is not None
            return source_of(self._drafter)
        return "grammar", 0

    @property
    def forward_count(self) -> int:
        """Those of the other drafter."""
        return 0 if self._targeted is None else self._targeted.forward_count

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
            asked = budget_for(self._drafter, budget - len(draft), self.budget_of)
            guess = checked_proposal(self._drafter, seen, asked, self._lookahead.vocab_size)
            if isinstance(guess, DeviceDraft):
                # Where the grammar cuts it, the host decides.
                guess = token_ids(guess.tokens, self._lookahead.vocab_size, "draft")
            allowed = guess[: self._lookahead.go_along(guess)]
            self._guessed = bool(allowed)
            draft += allowed
            self._longest = len(history) + len(draft) + 1
        return draft + self._lookahead.go_where_forced(budget - len(draft))

    def commit(self, length: int) -> None:
        """See `Drafter.commit`: what was forced after the other drafter's guess is not its own."""
        if self._drafter is not None:
            longest, self._longest = self._longest, None
            self._drafter.commit(length if longest is None else min(length, longest))

    def reset(self) -> None:
        """See `Drafter.reset`."""
        self._guessed = False
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
