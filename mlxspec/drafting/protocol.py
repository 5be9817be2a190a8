"""What a decoder asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mlxspec.errors import DrafterError

if TYPE_CHECKING:
    from mlxspec.decoding.target import TargetChoice
    from mlxspec.drafting.device import DeviceDraft


@runtime_checkable
class Drafter(Protocol):
    """Guesses the tokens that follow a history. A wrong guess costs time and nothing else.

    A drafter may have a property `source`, see `source_of`. One that asks others may have an
    attribute `budget_of`, see `budget_for`.
    """

    def propose(self, history: Sequence[int], budget: int) -> Sequence[int] | DeviceDraft:
        """Guess what follows.

        Args:
            history: Every committed token so far, prompt and output, the newest last. A
                read-only view that is valid during the call.
            budget: Most tokens that can be used, 0 or more; a longer guess is cut.

        Returns:
            At most `budget` token ids of the target, possibly none.
        """

    def commit(self, length: int) -> None:
        """The first `length` tokens of the history are final.

        Called after every round, however it ended. Of the tokens past the history that was last
        proposed for, all but the newest are then what was proposed.
        """

    def reset(self) -> None:
        """A new sequence begins, which may share nothing with the last one."""


@runtime_checkable
class ForcingDrafter(Drafter, Protocol):
    """A drafter that knows of some tokens that no other can come in their place."""

    def certain(self, most: int) -> list[int]:
        """The tokens that come next whatever the target says, at most so many.

        Called before `propose`, which then guesses what follows them: its history ends with them.
        """


@runtime_checkable
class TargetedDrafter(Drafter, Protocol):
    """A drafter with a state of its own that wants to know whom it drafts for."""

    @property
    def forward_count(self) -> int:
        """Forwards of its models so far, those over prompts included."""

    def require_vocabulary(self, vocab_size: int, tokenizer: Any) -> None:
        """Refuse a target whose token ids mean something else; nothing has been generated yet.

        Args:
            vocab_size: Entries in a row of the target's logits.
            tokenizer: The target's, or None where it is not known.

        Raises:
            VocabularyMismatch: Names the tokens.
        """

    def lease(self) -> AbstractContextManager[None]:
        """Be held for one generation; a second holder gets `EngineBusy`."""

    def begin(self, prompt: Sequence[int], target: TargetChoice) -> None:
        """Take in the prompt of a new sequence, and how the target chooses."""


def source_of(drafter: Drafter) -> tuple[str, int]:
    """What the drafter's last proposal came from, and how strong the evidence was.

    Proposals of one source are expected to be accepted alike. A drafter says it by its property
    `source`; without one the name of its type has to do.

    Raises:
        DrafterError: It is no name with a whole number of 0 or more.
    """
    source: object = getattr(drafter, "source", (type(drafter).__name__, 0))
    match source:
        case (str(name), int(evidence)) if evidence >= 0:
            return name, evidence
    raise DrafterError(
        f"drafter {type(drafter).__name__}: expected source to be a name and an amount of "
        f'evidence, 0 or more, as in ("lookup", 5), got {source!r}'
    )


# Most tokens that a source should draft: by its name, by what a token of it takes in seconds where
# that is known beforehand, and by what it takes before the first one.
BudgetOf = Callable[[str, float | None, float], int]


def budget_for(
    drafter: Drafter, history: Sequence[int], budget: int, budget_of: BudgetOf | None
) -> int:
    """How many tokens to ask a drafter for, where its source may have a budget of its own.

    A drafter that asks others is handed `budget_of`, and asks each of them for no more than that
    allows: what one source should draft says nothing of another that costs more. A drafter that
    knows what its tokens take says so as `seconds_per_token`, and by `seconds_behind(length)` what
    it has to take in before, of a history so long.

    Args:
        drafter: The one to be asked.
        history: What it will be asked to go on from.
        budget: Most tokens that can be used.
        budget_of: Most tokens that a source should draft; None: `budget`.
    """
    if hasattr(drafter, "budget_of"):
        drafter.budget_of = budget_of
        return budget
    if budget_of is None:
        return budget
    seconds = getattr(drafter, "seconds_per_token", None)
    behind = getattr(drafter, "seconds_behind", None)
    before = 0.0 if behind is None else behind(len(history))
    return min(budget, budget_of(source_of(drafter)[0], seconds, before))
