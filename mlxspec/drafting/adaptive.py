"""How many tokens to draft: as many as pay, by the cost of a tile and what was accepted so far."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxspec.engine.costs import TileCosts

Source = tuple[str, int]
WidthOf = Callable[[int], int]

# A draft has to promise this much more than none, or than the length in use, to be taken up.
_HYSTERESIS = 1.03
# Plain steps that a text may lose to drafts, 2 % of 200 tokens, and then more for every token.
_CAPITAL, _CAPITAL_FOR = 4.0, 200
_INCOME_PER_TOKEN = 0.01
# Most of what is left of them that a round may be expected to lose.
_STAKE = 0.25
# What an observation still weighs at the next one, and how improbable a run of equal outcomes has
# to be for what was seen before it to count no more than what is assumed of a new text.
_KEPT = 0.95
_IMPROBABLE = 0.01
_PRIOR_WEIGHT = 2.0
# Rounds from one trial to the next while parked: doubled by every failure.
_TRIAL_INTERVAL, _LONGEST_TRIAL_INTERVAL = 8, 256
_LONGEST_TRIAL = 3
# A drafter costs nothing where a token costs less than this share of a plain step. Before it was
# measured, a lookup is taken to cost nothing, and others this much.
_FREE = 0.01
# What a grammar forces is right: its rows save a step each, whatever they cost.
_CERTAIN = "grammar"
_ASSUMED_DRAFT_COST = 0.1
# Rounds whose median is what is measured, and how many of them are enough.
_SAMPLES, _ENOUGH = 5, 3
# What was measured this many rounds ago is doubted if costs have moved by this factor since.
_TRUSTED_FOR, _FAR = 8, 1.3
# A caller who takes long with every token hides what plain steps cost; so often one is awaited.
_TOLD_EVERY = 64


def prior_acceptance(name: str, evidence: int) -> float:
    """Expected acceptance of a token with this much evidence, before anything was seen.

    Of a lookup, the longer the match, the surer is what followed it: a power law, 0.42 after 3
    tokens and 0.84 after 8. The five texts of `bench` are in between those that do better
    (copies) and those that do worse (prose); what a text shows outweighs it after two tokens.
    """
    if name != "lookup":
        return 0.7
    return max(0.05, 1.0 - 2.4 * max(evidence, 1) ** -1.3)


@dataclass
class _Drafting:
    """What is known of one source: its acceptance by evidence, its cost, and its trials.

    Attributes:
        name: The source.
        hits: Weight of drafted tokens that came true, by amount of evidence.
        tried: Weight of all of them.
        runs: The latest outcome, and how probable its repetition was until now.
        costs: Seconds per drafted token in the latest rounds.
        foretold: What the drafter itself says they take, or None.
        behind: Seconds that it needs before the first one, to take in what it has not seen.
        choice: Evidence and length of the last draft chosen.
        parked_for: Parked rounds since the last trial.
        interval: How many of them there are from one trial to the next.
    """

    name: str
    hits: dict[int, float] = field(default_factory=dict)
    tried: dict[int, float] = field(default_factory=dict)
    runs: dict[int, tuple[bool, float]] = field(default_factory=dict)
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    foretold: float | None = None
    behind: float = 0.0
    choice: tuple[int, int] = (0, 0)
    parked_for: int = 0
    interval: int = _TRIAL_INTERVAL

    def rate(self, evidence: int) -> float:
        """Expected acceptance of a token with this much evidence."""
        bucket = _bucket(evidence)
        if bucket in self.tried:
            return self.hits[bucket] / self.tried[bucket]
        if self.name == "lookup" or bucket == 0:
            return prior_acceptance(self.name, evidence)
        # A draft that was right so far is as good as its shorter beginnings were.
        return self.rate(_first_of(bucket - 1))

    def observe(self, evidence: int, hit: bool) -> None:
        """A drafted token with this much evidence came true or did not."""
        bucket = _bucket(evidence)
        if bucket not in self.tried:
            self.hits[bucket] = _PRIOR_WEIGHT * self.rate(evidence)
            self.tried[bucket] = _PRIOR_WEIGHT
        outcome, likelihood = self.runs.get(bucket, (hit, 1.0))
        share = self.hits[bucket] / self.tried[bucket]
        likelihood = (likelihood if outcome == hit else 1.0) * (share if hit else 1.0 - share)
        self.runs[bucket] = hit, likelihood
        kept = _KEPT
        if likelihood < _IMPROBABLE:
            # The text has turned: what was seen before tells little any more.
            kept = min(kept, _PRIOR_WEIGHT / self.tried[bucket])
            self.runs[bucket] = hit, 1.0
        self.hits[bucket] = kept * self.hits[bucket] + hit
        self.tried[bucket] = kept * self.tried[bucket] + 1.0

    def cost(self, plain: float) -> float:
        """Seconds of a drafted token, 0 where it is too little to matter; `plain` is a step's."""
        if self.costs:
            seconds = statistics.median(self.costs)
        elif self.foretold is not None:
            seconds = self.foretold
        else:
            seconds = 0.0 if self.name == "lookup" else _ASSUMED_DRAFT_COST * plain
        return seconds if seconds > _FREE * plain else 0.0


@dataclass
class _Guess:
    """A proposal that is compared with the text as it grows, whether it was verified or not."""

    drafting: _Drafting
    evidence: int
    tokens: list[int]
    right: int = 0


class AdaptiveDraftCount:
    """Chooses draft lengths that maximise expected tokens per second, for one text.

    Expected is (1 + accepted) / (seconds of the draft + seconds of the tile). A draft is accepted
    up to its first wrong token, so accepted is the sum over i of the product of the first i
    acceptance rates. These are learnt for every source by evidence: the i-th token after a match
    of m tokens counts like one after a match of m + i. What was proposed for nothing is compared
    with the text even where it was not verified: so a parked text knows at once when drafts pay
    again. A drafter that costs time is tried now and then.

    What drafts may cost is bounded: no round is begun whose total failure would bring the text
    more than four plain steps behind plain decoding, and 1 % of its tokens beyond the first 200.

    Nothing here decides which tokens are emitted.

    Args:
        costs: Seconds of a tile by its width; measured rounds correct them.
        plain_width: Rows of the tile that decodes plainly.

    Attributes:
        parked: Whether a source that costs time was asked for nothing in this round.
    """

    def __init__(self, costs: TileCosts, plain_width: int = 1):
        self._costs = _RunningCosts(costs)
        self._plain_width = plain_width
        self._sources: dict[str, _Drafting] = {}
        self._guesses: list[_Guess] = []
        self._compared = 0
        self._capital = _CAPITAL
        self._emitted = 0
        self._limit = 0
        self._certain = 0
        self._width_of: WidthOf = lambda drafts: drafts + 1
        self._begun = False
        self._wanted = False
        # Plain rounds in a row whose time told nothing.
        self._untold = 0
        self.parked = False
        self._draft_seconds = 0.0
        # The sources that cost time and are asked in this round, and what they need before their
        # first token.
        self._asked: set[str] = set()
        self._behind = 0.0
        self._drafted: tuple[_Drafting, int, bool] | None = None
        self._on_trial: str | None = None

    def begin(
        self,
        history: Sequence[int],
        limit: int,
        width_of: WidthOf,
        certain: int = 0,
        *,
        begun: bool = False,
        plain_width: int | None = None,
    ) -> None:
        """A round begins.

        Args:
            history: Every token so far.
            limit: Most drafts that can be used now, 0 or more.
            width_of: Rows of the tile that verifies so many drafts now.
            certain: Tokens at the history's end that the round verifies and emits anyhow.
            begun: Whether its plain step is under way, so that no draft can be used and none
                that costs time is asked for.
            plain_width: Rows of the tile that decodes plainly here, if that has changed.
        """
        self._plain_width = plain_width or self._plain_width
        self._compare(history)
        # Where all that is known of plain decoding is old, a plain step says what it costs now.
        self._limit = 0 if self._costs.outdated(self._plain_width) else limit
        self._width_of = width_of
        self._certain = certain
        self._begun, self._wanted = begun, False
        self.parked = False
        self._draft_seconds = self._behind = 0.0
        self._asked.clear()
        self._drafted = None
        self._on_trial = None

    def budget(
        self, name: str, seconds_per_token: float | None = None, seconds_behind: float = 0.0
    ) -> int:
        """How many tokens to ask a source for: all that can be used where they cost nothing.

        Args:
            name: The source.
            seconds_per_token: What a token of it takes, where that is known beforehand.
            seconds_behind: What it takes before the first one, to take in what it has not seen.
        """
        drafting = self._drafting(name)
        drafting.foretold = seconds_per_token
        drafting.behind = seconds_behind
        cost = drafting.cost(self._plain_cost)
        if cost == 0.0 or self._limit == 0 or name == _CERTAIN:
            return self._limit
        # What evidence there will be is not known yet: as much as last time.
        asked_before, self._behind = self._behind, self._behind + seconds_behind
        count = self._best(drafting, drafting.choice[0], self._limit, cost)
        if count and self._begun:
            self._wanted = True
            self._behind = asked_before
            return 0
        if count == 0:
            self.parked = True
            drafting.parked_for += 1
            if drafting.parked_for >= drafting.interval and not self._begun:
                count = self._trial(cost, seconds_behind)
                self._on_trial = name if count else self._on_trial
        if count:
            self._asked.add(name)
        else:
            self._behind = asked_before
        return count

    def keep(
        self, source: Source, count: int, seconds: float, tokens: Sequence[int] | None = None
    ) -> int:
        """How many of the proposed tokens to verify; what they cost is spent already.

        Args:
            source: What the proposal came from, and how strong the evidence for it is.
            count: How many tokens it has.
            seconds: What the drafter took.
            tokens: The tokens, where the host knows them.
        """
        name, evidence = source
        drafting = self._drafting(name)
        behind, self._behind = self._behind, 0.0
        if count and not behind and self._asked <= {name}:
            drafting.costs.append(seconds / count)
        if behind or self._asked or drafting.cost(self._plain_cost):
            # Also where nothing came of it.
            self._draft_seconds = seconds
        count = min(count, self._limit)
        if count == 0:
            return 0
        if tokens is not None:
            self._remember(_Guess(drafting, evidence, list(tokens)))
        if self._on_trial != name and name != _CERTAIN:
            count = self._best(drafting, evidence, count, 0.0)
        drafting.choice = (evidence, count)
        self._drafted = (drafting, evidence, tokens is not None)
        return count

    def record(
        self,
        *,
        drafted: int,
        accepted: int,
        emitted: int,
        width: int,
        seconds: float,
        usual: bool = True,
    ) -> None:
        """Learn from the round that began last.

        Args:
            drafted: Tokens verified after the anchor.
            accepted: How many of them came true.
            emitted: Tokens emitted.
            width: Rows of the tile.
            seconds: What the forward took.
            usual: Whether it was one forward and nothing was traced: else its time says nothing
                of the next.
        """
        if usual:
            self._costs.observe(width, seconds)
        if width == self._plain_width:
            self._untold = 0 if usual else self._untold + 1
        spent = self._costs.of(width) + self._draft_seconds
        trial, drafted_by = self._on_trial, self._drafted and self._drafted[0].name
        if trial is not None and trial != drafted_by:
            self._failed(self._drafting(trial))
        if drafted and self._drafted is not None:
            drafting, evidence, comparable = self._drafted
            if not comparable:
                for index in range(min(accepted + 1, drafted)):
                    drafting.observe(evidence + index, index < accepted)
            drafting.parked_for = 0
            on_trial = self._on_trial == drafting.name
            if on_trial and accepted == 0:
                self._failed(drafting)
            elif accepted:
                drafting.interval = 1 if on_trial else _TRIAL_INTERVAL
        self._emitted += emitted
        income = _INCOME_PER_TOKEN * emitted if self._emitted > _CAPITAL_FOR else 0.0
        self._capital += emitted + income - spent / self._plain_cost

    @property
    def rests(self) -> bool:
        """Whether the next round is sure to be plain: all drafts cost time, and are parked."""
        return (
            self.parked
            and not self.awaits
            and all(
                drafting.parked_for > 0 and drafting.cost(self._plain_cost) > 0
                for drafting in self._sources.values()
            )
        )

    @property
    def awaits(self) -> bool:
        """Whether the next round may not have begun when it is asked for.

        Because a draft that costs time is wanted, or a trial of one is due, or because only a
        plain step from its beginning to its end tells what those cost now.
        """
        due = any(
            drafting.parked_for + 1 >= drafting.interval
            and self._trial(drafting.cost(self._plain_cost), drafting.behind) > 0
            for drafting in self._sources.values()
        )
        unknown = self._untold >= _TOLD_EVERY or self._costs.outdated(self._plain_width)
        return self._wanted or due or unknown

    def costs(self) -> TileCosts:
        """Seconds of a tile by its width, by all that this text has shown."""
        return self._costs.corrected()

    def _best(self, drafting: _Drafting, evidence: int, limit: int, per_token: float) -> int:
        """The length that promises most tokens per second; 0 where none pays."""
        sure = 1.0 + self._certain
        undrafted = sure / self._costs.of(self._width_of(0))
        stay = drafting.choice[1] if drafting.choice[0] == evidence else 0
        best, best_rate, stay_rate = 0, undrafted * (1.0 if stay else _HYSTERESIS), 0.0
        expected, reached = sure, [1.0]
        width = self._width_of(1) if limit else 0
        for count in range(1, limit + 1):
            reached.append(reached[-1] * drafting.rate(evidence + count - 1))
            expected += reached[-1]
            next_width = self._width_of(count + 1) if count < limit else 0
            # Of drafts that cost nothing, the tile is filled.
            if per_token or next_width != width:
                seconds = self._costs.of(width) + per_token * count
                rate = expected / seconds
                if rate > undrafted and self._affords(seconds, reached):
                    if rate > best_rate:
                        best, best_rate = count, rate
                    if count == stay:
                        stay_rate = rate
            width = next_width
        if stay_rate * _HYSTERESIS > best_rate:
            best, best_rate = stay, stay_rate
        return self._wider(best, best_rate, limit, reached, per_token) if best else 0

    def _wider(
        self, count: int, rate: float, limit: int, reached: Sequence[float], per_token: float
    ) -> int:
        """This many drafts, or what fills the next wider tile where it has yet to be tried.

        The cost curve may have been measured while the machine was busy. So where drafts are
        likely right to the end of that tile, and it would pay if a row cost half as much there,
        one round finds out.
        """
        width = self._width_of(count)
        wider = next(
            (self._width_of(k) for k in range(count + 1, limit + 1) if self._width_of(k) > width),
            width,
        )
        if wider == width or self._costs.met(wider):
            return count
        filled = max(k for k in range(count + 1, limit + 1) if self._width_of(k) == wider)
        believed = self._costs.of(wider)
        hoped = min(believed, self._costs.of(width) * (1.0 + 0.5 * (wider - width) / width))
        drafting = per_token * filled
        pays = sum(reached[: filled + 1]) / (hoped + drafting) > _HYSTERESIS * rate
        likely = reached[filled] > 0.5 if filled < len(reached) else False
        affords = self._affords(believed + drafting, reached)
        return filled if pays and likely and affords else count

    def _affords(self, seconds: float, reached: Sequence[float]) -> bool:
        """Whether the text can bear a round's failure, and what it is expected to lose.

        Args:
            seconds: Of the whole round.
            reached: Probabilities that at least 0, 1, 2 ... drafts are accepted.
        """
        worst = (seconds + self._behind) / self._plain_cost - 1.0 - self._certain
        if worst > self._capital:
            return False
        # With a accepted the loss is worst - a; its expectation is the sum over a of the
        # probability of no more than a, times how much of a step is still lost there.
        expected = sum(
            (1.0 - more) * min(1.0, worst - accepted)
            for accepted, more in enumerate((*reached[1:], 0.0))
            if accepted < worst
        )
        return expected <= _STAKE * self._capital

    def _trial(self, per_token: float, behind: float) -> int:
        """A short draft in the narrowest tile that has room for one, if it can be afforded.

        And if it could pay: of drafts that cost more than plain steps there is nothing to learn.
        """
        sure = 1.0 + self._certain
        undrafted = sure / self._costs.of(self._width_of(0))
        if not any(
            sure + drafts
            > undrafted * (self._costs.of(self._width_of(drafts)) + per_token * drafts)
            for drafts in range(1, self._limit + 1)
        ):
            return 0
        width = self._width_of(1)
        count = 1
        while count < min(self._limit, _LONGEST_TRIAL) and self._width_of(count + 1) == width:
            count += 1
        seconds = self._costs.of(width) + per_token * count + behind
        worst = seconds / self._plain_cost - 1.0 - self._certain
        return count if worst <= self._capital else 0

    def _compare(self, history: Sequence[int]) -> None:
        """Tell the open guesses what the text turned out to be."""
        for position in range(self._compared, len(history)) if self._guesses else ():
            token = history[position]
            still_right = []
            for guess in self._guesses:
                hit = guess.tokens[guess.right] == token
                guess.drafting.observe(guess.evidence + guess.right, hit)
                guess.right += 1
                if hit and guess.right < len(guess.tokens):
                    still_right.append(guess)
            self._guesses = still_right
        self._compared = len(history)

    def _remember(self, new: _Guess) -> None:
        """Compare this proposal with the text, unless an open one says the same already."""
        for guess in self._guesses:
            rest = guess.tokens[guess.right :]
            if rest == new.tokens[: len(rest)]:
                return
        self._guesses.append(new)

    @property
    def _plain_cost(self) -> float:
        """Seconds of a plain step."""
        return self._costs.of(self._plain_width)

    @staticmethod
    def _failed(drafting: _Drafting) -> None:
        """A trial came to nothing: the next one is later."""
        drafting.parked_for = 0
        drafting.interval = min(2 * drafting.interval, _LONGEST_TRIAL_INTERVAL)

    def _drafting(self, name: str) -> _Drafting:
        return self._sources.setdefault(name, _Drafting(name))


class _RunningCosts:
    """A cost curve that measured rounds bend: by one factor for all widths, and one for each.

    The context grows and the machine is shared, which moves all widths alike; so a width that was
    not met for long moves with the others.
    """

    def __init__(self, costs: TileCosts):
        self._curve = costs
        self._rounds = 0
        self._met: dict[int, tuple[int, float]] = {}
        self._drift = 1.0
        self._relative: dict[int, deque[float]] = {}

    def of(self, width: int) -> float:
        """Seconds of a tile of this width, by all that is known now."""
        return self._curve.of(width) * self._drift * self._factor(width)

    def observe(self, width: int, seconds: float) -> None:
        """A tile took this long; a single one that took much longer than others moves little."""
        ratio = max(1e-9, seconds) / self._curve.of(width)
        if self._curve.assumed and not self._rounds:
            self._drift = ratio
        surprise = min(2.0, max(0.5, ratio / (self._drift * self._factor(width))))
        self._drift *= surprise ** max(0.1, 1.0 / (self._rounds + 2))
        samples = self._relative.setdefault(width, deque(maxlen=_SAMPLES))
        samples.append(ratio / self._drift)
        self._rounds += 1
        if len(samples) >= _ENOUGH:
            self._met[width] = self._rounds, self._drift

    def outdated(self, width: int) -> bool:
        """Whether costs have moved far since this width was met, which was long ago."""
        rounds, drift = self._met.get(width, (0, 1.0))
        moved = self._drift / drift
        return self._rounds - rounds > _TRUSTED_FOR and not 1 / _FAR < moved < _FAR

    def corrected(self) -> TileCosts:
        """The curve as the rounds have bent it."""
        widths = sorted({*self._curve.widths, *self._relative})
        seconds = tuple((width, self.of(width)) for width in widths)
        return replace(self._curve, seconds=seconds) if self._rounds else self._curve

    def met(self, width: int) -> bool:
        """Whether a tile of this width was timed in this text."""
        return width in self._relative

    def _factor(self, width: int) -> float:
        samples = self._relative.get(width, ())
        if len(samples) >= _ENOUGH:
            return statistics.median(samples)
        # The machine may have been slower throughout when the curve was measured, so a wider tile
        # is taken to be as far off as the widest known one below it. A narrower one is not: where
        # all looks dear but plain steps, one of those is made and shows what they cost.
        narrower = [w for w, seen in self._relative.items() if w < width and len(seen) >= _ENOUGH]
        expected = statistics.median(self._relative[max(narrower)]) if narrower else 1.0
        # What disturbs a measurement adds to it: one quick tile shows a curve that is too dear,
        # one slow tile shows nothing.
        return min(expected, *samples) if samples else expected


def _bucket(evidence: int) -> int:
    """Amounts of evidence that count as one: each alone up to 8, then four per doubling."""
    if evidence <= 8:
        return evidence
    doublings = evidence.bit_length() - 3
    return (evidence >> doublings) + 4 * doublings


def _first_of(bucket: int) -> int:
    """The least evidence in a bucket."""
    if bucket <= 8:
        return bucket
    doublings = (bucket - 4) // 4
    return (bucket - 4 * doublings) << doublings
