"""Steps submitted before their token is read: nothing but the time tells, and drafts still come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import (
    Chain,
    DraftModel,
    PromptLookup,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
)
from mlxspec.decoding import drafts
from mlxspec.engine import VerifyRows
from mlxspec.engine.costs import TileCosts
from mlxspec.errors import EngineBusy
from tests.cases import prompt_of
from tests.decoding.test_adaptive_decoding import FAMILIES, SCRIPT, Costly, N, engine_of
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter, plans
from tests.scripted import ScriptedEngine

ADAPTIVE = SpeculativeDecodingOptions(adaptive=True)


def synchronous(engine, prompt, **how):
    """What is said where every step waits for the last token."""
    decoder = SpeculativeDecoder(engine)
    decoder._steps_ahead = False
    tokens = [e.token for e in decoder.generate(prompt, max_tokens=-1, **how)]
    assert decoder.stats.pipelined_rounds == 0
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_pipelined_but_for_spans_ends_and_wastes_no_forward(family):
    engine, prompt = engine_of(family), prompt_of(20)
    expected = synchronous(engine, prompt)
    before = engine.forward_count
    decoder = SpeculativeDecoder(engine)
    tokens = [e.token for e in decoder.generate(prompt, max_tokens=-1)]
    assert tokens == expected
    assert engine.forward_count - before == decoder.stats.forwards == len(tokens) == N - 20
    # The first token waits for no second step, and positions 32 and 64 begin spans.
    assert decoder.stats.pipelined_rounds == len(tokens) - 4
    assert decoder.stats.as_dict()["pipelined_rounds"] == decoder.stats.pipelined_rounds


def test_the_last_token_wanted_begins_no_step():
    engine = engine_of("llama")
    before = engine.forward_count
    decoder = SpeculativeDecoder(engine)
    assert len(list(decoder.generate(prompt_of(5), max_tokens=7))) == 7
    assert engine.forward_count - before == 7
    assert decoder.stats.pipelined_rounds == 5


@given(
    family=st.sampled_from(FAMILIES),
    plan=plans(),
    quiet=st.integers(0, 4),
    adapts=st.booleans(),
    most=st.integers(0, 9),
    end=st.integers(0, 60),
    closed=st.booleans(),
)
def test_wherever_a_text_ends_the_next_turn_is_that_of_a_text_without_steps_ahead(
    family, plan, quiet, adapts, most, end, closed
):
    """By a stop token or because nobody wants more; with drafts that come after some silence."""
    engine, prompt = engine_of(family), prompt_of(15)
    said = synchronous(engine, prompt)
    end = min(end, said.index(said[end]))
    following = [*prompt, *said[: end + 1], 3, 4]
    if len(following) >= N - 2:
        return
    expected = synchronous(engine, following)
    drafter = PlannedDrafter(prompt + said, plan, engine.vocab_size)
    options = SpeculativeDecodingOptions(most, adaptive=adapts)
    decoder = SpeculativeDecoder(engine, drafter, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "_QUIET", quiet)
        stop = () if closed else (said[end],)
        emissions = decoder.generate(prompt, max_tokens=-1, stop_tokens=stop)
        tokens = []
        for emission in emissions:
            tokens.append(emission.token)
            if closed and len(tokens) == end + 1:
                emissions.close()
                break
        assert tokens == said[: end + 1]
        assert list(engine.tokens) == prompt + tokens[:-1]
        assert engine._ahead is None
        assert decoder.stats.forwards == decoder.stats.rounds
        again = SpeculativeDecoder(engine, drafter, options)
        turn = [e.token for e in again.generate(following, max_tokens=-1)]
    assert turn == expected


def test_a_caller_who_chooses_sees_no_row_ahead_of_its_token():
    model, calls = tiny_model("llama"), []

    def processor(tokens, logits):
        calls.append(len(tokens))
        return logits

    stats = SpeculationStats()
    steps = mlxspec.generate_step(
        prompt_of(5), model, max_tokens=12, logits_processors=[processor], stats=stats
    )
    assert len(list(steps)) == 12
    assert calls == list(range(5, 17))
    assert stats.pipelined_rounds == 0


def test_the_engine_of_a_text_that_somebody_else_spoiled_is_left_alone():
    engine = engine_of("llama")
    emissions = SpeculativeDecoder(engine).generate(prompt_of(5), max_tokens=20)
    for _ in range(3):
        next(emissions)
    assert engine._ahead is not None
    engine.reset(0)
    engine.prefill([1, 2])
    assert engine.verify([3], ahead=True).ahead
    begun = engine._ahead
    with pytest.raises(EngineBusy):
        next(emissions)
    assert list(engine.tokens) == [1, 2, 3]
    assert engine._ahead is begun


class Pipelined(ScriptedEngine):
    """A scripted engine whose device works on a clock of its own, and whose host needs time too."""

    steps_ahead = True
    takes_device_drafts = False

    def __init__(self, *how, host=0.0, left=math.inf, **more):
        super().__init__(*how, **more)
        self.host = host
        # A device takes no more: who submits waits until so many seconds of work are left.
        self.left = left
        self.now = self.free_at = 0.0
        self.begun: list[int] | None = None
        self.unused = 0
        self.learnt = None
        self.tile_widths = (1, 2, 4, 8)
        self.tile_costs = TileCosts(((1, 1.0), (2, 1.05), (4, 1.1), (8, 1.2)))

    def tile_width_for(self, drafts):
        return next(w for w in self.tile_widths if w > drafts)

    def learn_tile_costs(self, costs):
        self.learnt = costs

    def submit(self, rows):
        width = next(w for w in self.tile_widths if w >= rows)
        self.now += self.host
        self.free_at = max(self.now, self.free_at) + self.tile_costs.of(width)
        self.now = max(self.now, self.free_at - self.left)
        return self.free_at

    def verify(self, block, capture, noise_key=None, drafted=None, ahead=False):
        if self.begun is not None and self.begun[0] == list(block):
            done = self.begun[1]
        else:
            self.unused += self.begun is not None
            done = self.submit(len(block))
        rows = super().verify(block, capture, noise_key)
        self.begun = ([rows.argmax[-1]], self.submit(1)) if ahead else None
        self.now = max(self.now, done)
        return VerifyRows(rows.argmax, rows.nan_count, 1, ahead=ahead)


@pytest.mark.parametrize("host", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("slow", [0.0, 0.03, 0.5, 0.95, 1.2, 2.5, 10.0])
def test_a_step_that_went_on_while_the_caller_was_busy_costs_what_it_costs(slow, host):
    """Neither what was left of it when somebody came to read, nor what the caller took."""
    engine = Pipelined(SCRIPT[:300], 100, host=host)
    decoder = SpeculativeDecoder(engine, Costly(engine), ADAPTIVE, clock=lambda: engine.now)
    for _ in decoder.generate(SCRIPT[:10], max_tokens=-1):
        engine.now += slow
    assert decoder.stats.pipelined_rounds > 200
    assert 0.98 <= engine.learnt.of(1) <= 1.03 + host
    if slow < 0.05:
        # The host works while the device does.
        assert engine.learnt.of(1) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("left", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("slow", [0.0, 0.03, 0.5, 2.5])
def test_a_step_costs_no_more_where_the_next_one_is_not_taken_before_it_is_nearly_done(slow, left):
    """The first step of a run has then the second one's time in it, and the last one hardly any."""
    engine = Pipelined(SCRIPT, 100, left=left)
    seen = []
    engine.learn_tile_costs = lambda costs: seen.append(costs.of(1))
    for length in range(4, 60, 3):
        decoder = SpeculativeDecoder(engine, Costly(engine), ADAPTIVE, clock=lambda: engine.now)
        for _ in decoder.generate(SCRIPT[:10], max_tokens=length):
            engine.now += slow
        engine.reset(0)
    assert decoder.stats.pipelined_rounds > 20
    assert seen == pytest.approx([1.0] * len(seen), rel=0.03)


def test_a_step_that_costs_more_than_it_did_is_measured_though_the_caller_is_slow():
    """Where all that is known is outdated, a plain step is awaited, and tells."""
    engine = Pipelined(SCRIPT * 3, 100)
    decoder = SpeculativeDecoder(engine, Costly(engine), ADAPTIVE, clock=lambda: engine.now)
    for count, _ in enumerate(decoder.generate(SCRIPT[:10], max_tokens=-1)):
        engine.now += 2.0
        if count == 100:
            engine.tile_costs = TileCosts(((1, 3.0), (2, 3.15), (4, 3.3), (8, 3.6)))
    assert engine.learnt.of(1) == pytest.approx(3.0, rel=0.1)


class Model(Costly):
    """A drafter that costs a tenth of a step a token, and is right in parts of the text."""

    source = ("model", 0)

    def __init__(self, engine, right=()):
        super().__init__(engine)
        self.right = right
        self.at = []

    def propose(self, history, budget):
        if budget:
            self.at.append(len(history))
        self.asked.append(budget)
        self.engine.now += 0.1 * budget
        known = self.engine.script[len(history) : len(history) + budget]
        return known if len(history) in self.right else [1] * budget


@pytest.mark.parametrize("right", [range(0), range(150, 2000), range(60, 90), range(500, 2000)])
@pytest.mark.parametrize("chained", [False, True])
def test_a_parked_drafter_is_asked_when_it_would_be_without_steps_ahead(right, chained):
    """The moments of its trials are the same, no step is wasted, and no draft is lost."""
    script = [(i * i * 7 + i * 3 + i // 7) % 4999 + 2 for i in range(1500)]
    seen = []
    for ahead in (True, False):
        engine = Pipelined(script, 5010)
        engine.steps_ahead = ahead
        model = Model(engine, right)
        drafter = Chain(PromptLookup(), model) if chained else model
        decoder = SpeculativeDecoder(engine, drafter, ADAPTIVE, clock=lambda e=engine: e.now)
        tokens = [e.token for e in decoder.generate(script[:10], max_tokens=-1)]
        assert tokens[:-1] == script[10:]
        assert engine.unused == 0
        seen.append((model.at, decoder.stats.accepted, decoder.stats.pipelined_rounds, engine.now))
    (at, accepted, pipelined, now), (asked, right_drafts, none, then) = seen
    assert none == 0
    if right:
        # What a later trial finds, it finds no more than a step or two later.
        assert accepted > 0.98 * right_drafts
        assert now < 1.02 * then
    else:
        assert at == asked
        assert pipelined > 1200


def test_a_model_that_drafts_whether_it_pays_or_not_is_never_asked_for_nothing():
    """However long it had nothing to say: here because the text is longer than its context."""
    drafter = DraftModel(tiny_model("llama"), max_context_length=16, tile_widths=(1, 2))
    options = SpeculativeDecodingOptions(3)
    decoder = SpeculativeDecoder(engine_of("llama"), drafter, options)
    assert len(list(decoder.generate(prompt_of(20), max_tokens=60))) == 60
    assert (decoder.stats.drafted, decoder.stats.pipelined_rounds) == (0, 0)


def test_a_drafter_too_dear_to_be_tried_is_pipelined_all_along():
    engine = Pipelined(SCRIPT, 100)
    drafter = Costly(engine)
    drafter.seconds_per_token = 5.0
    decoder = SpeculativeDecoder(engine, drafter, ADAPTIVE, clock=lambda: engine.now)
    tokens = list(decoder.generate(SCRIPT[:10], max_tokens=-1))
    assert not any(drafter.asked)
    assert decoder.stats.pipelined_rounds == len(tokens) - 2


def test_a_lookup_that_finds_something_after_long_silence_drafts_one_step_later():
    text = [*range(2, 90), 1, *range(2, 90)]
    engine = Pipelined(text, 100)
    decoder = SpeculativeDecoder(engine, PromptLookup(), ADAPTIVE, clock=lambda: engine.now)
    emissions = list(decoder.generate(text[:10], max_tokens=-1))
    assert [e.token for e in emissions][:-1] == text[10:]
    stats = decoder.stats
    # Silence up to the copy, whose first three tokens are the evidence.
    silence = text.index(1) - 10 + 1 + 3
    assert stats.pipelined_rounds == silence - drafts._QUIET + 1
    first = next(i for i, e in enumerate(emissions) if e.from_draft)
    assert first == silence + 1
    assert engine.unused == 0


@pytest.mark.parametrize("chained", [False, True])
def test_what_a_draft_models_engine_has_to_say_is_in_every_response(chained):
    """Such as that its steps are awaited."""
    model = DraftModel(tiny_model("llama"), tile_widths=(1, 2))
    drafter = Chain(PromptLookup(), model) if chained else model
    decoder = SpeculativeDecoder(engine_of("llama"), drafter, SpeculativeDecodingOptions(3))
    decoder.engine._notes["placement"] = "first"
    model.engine._notes["copies"] = "every step is awaited"
    list(decoder.generate(prompt_of(5), max_tokens=8))
    assert decoder.stats.note == "first; draft model: every step is awaited"
    decoder.engine._notes.clear()
    model.engine._notes.clear()
    list(decoder.generate(prompt_of(5), max_tokens=8))
    assert decoder.stats.note is None
