"""Several drafters in a row: the first that has something to propose is taken at its word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mlxspec.drafting.protocol import BudgetOf, Drafter, TargetedDrafter, budget_for, source_of

if TYPE_CHECKING:
    from mlxspec.decoding.target import TargetChoice
    from mlxspec.drafting.device import DeviceDraft


class Chain:
    """Implements `TargetedDrafter` with others: cheap ones first, dear ones where those are mute.

    Args:
        *drafters: At least one.

    Attributes:
        budget_of: Most tokens to ask a source for; None: as many as of all others.

    Raises:
        ValueError: No drafter.
        TypeError: Something among them is none.
    """

    def __init__(self, *drafters: Drafter):
        if not drafters:
            raise ValueError("Chain: expected at least one drafter, got none")
        for drafter in drafters:
            if not isinstance(drafter, Drafter):
                raise TypeError(
                    f"Chain: expected drafters with propose, commit and reset, got {drafter!r}"
                )
        self.drafters = drafters
        self.budget_of: BudgetOf | None = None
        self._answered: Drafter = drafters[0]

    @property
    def source(self) -> tuple[str, int]:
        """That of the drafter which answered last; the last one's where none did."""
        return source_of(self._answered)

    @property
    def forward_count(self) -> int:
        """Forwards of all of them."""
        return sum(drafter.forward_count for drafter in self._targeted)

    @property
    def note(self) -> str | None:
        """What those that have something to say of themselves say, or None."""
        notes = (getattr(drafter, "note", None) for drafter in self._targeted)
        return "; ".join(filter(None, notes)) or None

    def propose(self, history: Sequence[int], budget: int) -> Sequence[int] | DeviceDraft:
        """The first proposal that is not empty."""
        proposal: Sequence[int] | DeviceDraft = []
        for drafter in self.drafters:
            asked = budget_for(drafter, history, budget, self.budget_of)
            proposal = drafter.propose(history, asked)
            self._answered = drafter
            if not hasattr(proposal, "__len__") or len(proposal):
                break
        return proposal

    def commit(self, length: int) -> None:
        """Tell all of them."""
        for drafter in self.drafters:
            drafter.commit(length)

    def reset(self) -> None:
        """Tell all of them."""
        for drafter in self.drafters:
            drafter.reset()

    def require_vocabulary(self, vocab_size: int, tokenizer: Any) -> None:
        """See `TargetedDrafter`."""
        for drafter in self._targeted:
            drafter.require_vocabulary(vocab_size, tokenizer)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Hold all of them."""
        with ExitStack() as leases:
            for drafter in self._targeted:
                leases.enter_context(drafter.lease())
            yield

    def begin(self, prompt: Sequence[int], target: TargetChoice) -> None:
        """Tell those that want to know."""
        for drafter in self._targeted:
            drafter.begin(prompt, target)

    @property
    def _targeted(self) -> list[TargetedDrafter]:
        return [drafter for drafter in self.drafters if isinstance(drafter, TargetedDrafter)]
