"""Drafting, seen from the decoder: drafts that fit and pay, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.decoding.target import TargetChoice
from mlxspec.drafting.adaptive import AdaptiveDraftCount
from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.proposals import checked_proposal
from mlxspec.drafting.protocol import (
    Drafter,
    ForcingDrafter,
    TargetedDrafter,
    budget_for,
    source_of,
)
from mlxspec.engine.costs import ASSUMED_COSTS
from mlxspec.engine.protocol import SpeculativeEngine
from mlxspec.engine.tokens import TokenView

# So many rounds in a row without a draft, and the next plain step is submitted unread. Each such
# step saves a wait for the host, about a fourteenth of a step where it was measured; a draft that
# begins meanwhile begins a step too late. So a silence costs a step at most that need not be, and
# one that a draft ends costs at most twice what was to be had by knowing its length beforehand.
_QUIET = 14
# The time from one reading to the next is a step's, if the caller had at most so much of it.
_CALLERS_SHARE = 0.05


class Drafts:
    """Asks a drafter for what fits and pays, round by round, and tells it what is final.

    Nothing here decides which tokens are emitted.

    Args:
        engine: Verifies the drafts.
        drafter: Guesses; None never does.
        options: How far to draft.
        stats: Counters to add to.
        clock: Returns seconds.
        on: Whether anything is drafted; else the drafter only hears what is final.

    Attributes:
        tile_width: Rows of the tile that verifies the last proposal.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        drafter: Drafter | None,
        options: SpeculativeDecodingOptions,
        stats: SpeculationStats,
        clock: Callable[[], float],
        *,
        on: bool,
    ):
        self._engine = engine
        self._drafter = drafter
        self._options = options
        self._stats = stats
        self._clock = clock
        self._on = on
        # The drafter, if it drafts at all and has a state of its own.
        self._targeted = drafter if on and isinstance(drafter, TargetedDrafter) else None
        self._adaptive: AdaptiveDraftCount | None = None
        # How many tokens of the engine's history the drafter has been shown.
        self._shown = 0
        # Of the last proposal, the first so many were certain.
        self._certain = 0
        # Rounds in a row that had no draft to use.
        self._quiet = 0
        self._before = _Spent.by(stats)
        self._widths_before = self._widths
        # When rows were read last, how long the caller then had the token, and what the forward
        # took where that can be told.
        self._read_at = 0.0
        self._caller_took = 0.0
        self._forward_took: float | None = None
        self.tile_width = 1

    def lease(self) -> AbstractContextManager[None]:
        """Hold the drafter for one text; a second holder gets `EngineBusy`."""
        return nullcontext() if self._targeted is None else self._targeted.lease()

    def begin(self) -> None:
        """A text begins, and nothing is known of what pays in it."""
        self._quiet = 0
        self._adaptive = None
        if self._on and self._options.adapts:
            costs = getattr(self._engine, "tile_costs", ASSUMED_COSTS)
            self._adaptive = AdaptiveDraftCount(costs, self._widths[0])

    def begin_prompt(self, prompt: Sequence[int], shared: int) -> None:
        """The drafter goes on from what it has seen, or begins anew.

        Args:
            prompt: Token ids.
            shared: How many of them are known to be what the text before began with.
        """
        if self._drafter is not None:
            if not 0 < self._shown <= shared:
                self._drafter.reset()
            self._drafter.commit(len(prompt))
        self._shown = 0

    def end_prompt(self, prompt: Sequence[int], target: TargetChoice) -> None:
        """The target has taken in the prompt; a draft model does now."""
        if self._targeted is not None:
            forwards = self._forward_count
            self._targeted.begin(prompt, target)
            self._stats.draft_forwards += self._forward_count - forwards

    @property
    def note(self) -> str | None:
        """What the drafter has to say about itself."""
        return getattr(self._targeted, "note", None)

    @property
    def nothing_follows(self) -> bool:
        """Whether the next round will have no draft, or hardly one: its step may begin unread."""
        if not self._on or self._drafter is None:
            return True
        if self._adaptive is None:
            # A model that drafts whether it pays or not is not to have drafted for nothing.
            return self._quiet >= _QUIET and self._targeted is None
        return self._adaptive.rests or (self._quiet >= _QUIET and not self._adaptive.awaits)

    def propose(self, anchor: int, wanted: int, *, begun: bool) -> list[int] | DeviceDraft:
        """A draft that fits: into one forward, the context, and the tokens still wanted.

        Args:
            anchor: The newest token.
            wanted: Tokens that may still be emitted.
            begun: Whether the anchor's plain step is under way. Then there is no draft; what
                would have been one ends the quiet.

        Raises:
            DrafterError: The drafter proposed something that is no token of the target.
        """
        self._before = _Spent.by(self._stats)
        self._widths_before = self._widths
        self._caller_took = self._clock() - self._read_at
        self._certain = 0
        draft: list[int] | DeviceDraft = []
        if self._on and self._drafter is not None:
            begin, forwards = self._clock(), self._forward_count
            draft = self._proposed(self._drafter, anchor, wanted, begun)
            self._quiet = 0 if len(draft) else self._quiet + 1
            if begun:
                draft = []
            self._stats.draft_forwards += self._forward_count - forwards
            self._stats.seconds["draft"] += self._clock() - begin
        self.tile_width = self._tile_width_for(len(draft))
        return draft

    def rows_read(self, *, begun: bool, ahead: bool) -> None:
        """A round's rows have been read.

        Args:
            begun: Whether they were under way before it.
            ahead: Whether the next round's are under way now.
        """
        now = self._clock()
        since, self._read_at = now - self._read_at, now
        if begun != ahead:
            # MLX submits no faster than the device works: most of the next step is in the time of
            # the first round of such a run, and the last has little more than what was left.
            self._forward_took = None
        elif not begun:
            self._forward_took = self._stats.seconds["verify"] - self._before.seconds
        elif self._caller_took <= _CALLERS_SHARE * since:
            # The device had this one step to do since the rows before were read.
            self._forward_took = since
        else:
            self._forward_took = None

    def settle(self, length: int, *, drafted: int, accepted: int, emitted: int) -> None:
        """A round has ended, however it did.

        Args:
            length: Tokens of the text that are final.
            drafted: Draft tokens verified in it.
            accepted: Those of them emitted.
            emitted: Tokens emitted.
        """
        if self._drafter is not None:
            self._drafter.commit(length)
        if self._adaptive is not None and emitted:
            before, now = self._before, _Spent.by(self._stats)
            took = self._forward_took
            self._adaptive.record(
                # What was certain tells nothing of the guess after it.
                drafted=max(0, drafted - self._certain),
                accepted=max(0, accepted - self._certain),
                emitted=emitted,
                width=self.tile_width,
                seconds=took or 0.0,
                usual=took is not None
                # The engine finds out where it stands, and may then have run another tile.
                and self._widths == self._widths_before
                and now.forwards - before.forwards == 1
                and now.traces == before.traces,
            )

    def end(self) -> None:
        """The text has ended: the next one begins with what was learnt of the costs."""
        learn = getattr(self._engine, "learn_tile_costs", None)
        if self._adaptive is not None and learn is not None:
            learn(self._adaptive.costs())

    def _proposed(
        self, drafter: Drafter, anchor: int, wanted: int, begun: bool
    ) -> list[int] | DeviceDraft:
        """What is certain to come, and a guess of what follows it."""
        limit = self._most(wanted)
        history = TokenView(self._engine.tokens, last=anchor)
        certain = drafter.certain(limit) if isinstance(drafter, ForcingDrafter) else []
        for token in certain:
            history = TokenView(history, last=token)
        self._certain, self._shown = len(certain), len(history)
        guess = self._guess(drafter, history, limit - len(certain), begun)
        if not certain:
            return guess
        assert isinstance(guess, list), "who forces tokens knows what follows them"
        return certain + guess

    def _most(self, wanted: int) -> int:
        """How many drafts fit."""
        if self._options.align_proposals or self._adaptive is not None:
            fits = self._engine.one_forward_draft_budget
        else:
            fits = self._engine.max_verify_block_length - 1
        most = self._options.most_draft_tokens
        return max(0, min(fits if most is None else most, fits, wanted - 1))

    def _guess(
        self, drafter: Drafter, history: TokenView, limit: int, begun: bool
    ) -> list[int] | DeviceDraft:
        """At most so many tokens, and of them no more than pay."""
        vocab_size, count, certain = self._engine.vocab_size, self._adaptive, self._certain
        if count is None:
            budget = budget_for(drafter, history, limit, None)
            return checked_proposal(drafter, history, budget, vocab_size)
        count.begin(
            history,
            limit,
            lambda k: self._tile_width_for(certain + k),
            certain,
            begun=begun,
            plain_width=self._widths[0],
        )
        budget = budget_for(drafter, history, limit, count.budget)
        begin = self._clock()
        guess = checked_proposal(drafter, history, budget, vocab_size)
        took = self._clock() - begin
        known: Sequence[int] | None = None
        if isinstance(guess, DeviceDraft):
            took += guess.seconds
        else:
            known = guess
        kept = count.keep(source_of(drafter), len(guess), took, known)
        could = len(guess) > 0 or count.parked
        self._stats.parked_rounds += not kept and not certain and could
        return guess[:kept]

    def _tile_width_for(self, drafts: int) -> int:
        """Rows of the tile that verifies so many drafts; as many as needed where unknown."""
        width_for = getattr(self._engine, "tile_width_for", None)
        return drafts + 1 if width_for is None else width_for(drafts)

    @property
    def _widths(self) -> tuple[int, ...]:
        """The ladder in use where the engine stands, as far as it says."""
        widths: tuple[int, ...] = getattr(self._engine, "tile_widths", (1,))
        return widths

    @property
    def _forward_count(self) -> int:
        return 0 if self._targeted is None else self._targeted.forward_count


class _Spent(NamedTuple):
    """What the counters say of forwards up to now."""

    seconds: float
    forwards: int
    traces: int

    @staticmethod
    def by(stats: SpeculationStats) -> _Spent:
        """Read them off."""
        return _Spent(stats.seconds["verify"], stats.forwards, stats.traces)
