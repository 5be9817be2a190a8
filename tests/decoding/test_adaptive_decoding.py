"""Drafting as much as pays changes how fast a text comes and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import (
    Chain,
    PromptLookup,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
)
from mlxspec.engine.costs import TileCosts
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter, plans
from tests.scripted import ScriptedEngine

FAMILIES = ("llama", "gemma3_text", "lfm2", "mamba2")
PROMPT = [5, 6, 7, 8, 9] * 4
N = 96
_engines: dict[str, StaticShapeEngine] = {}


def engine_of(family):
    if family not in _engines:
        _engines[family] = StaticShapeEngine(tiny_model(family), max_context_length=N, span_step=32)
    return _engines[family]


DEFAULT = SpeculativeDecodingOptions()


def run(engine, drafter=None, options=DEFAULT, prompt=PROMPT, **clock):
    decoder = SpeculativeDecoder(engine, drafter, options, **clock)
    emissions = list(decoder.generate(prompt, max_tokens=-1))
    return [emission.token for emission in emissions], decoder.stats


@given(
    family=st.sampled_from(FAMILIES),
    plan=plans(),
    step=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    most=st.sampled_from([None, 0, 1, 5]),
    align=st.booleans(),
)
def test_no_drafter_and_no_cost_changes_a_token(family, plan, step, most, align):
    engine = engine_of(family)
    engine._tile_costs = TileCosts(tuple((w, 1.0 + step * (w - 1)) for w in engine.tile_widths))
    plain, _ = run(engine)
    drafter = PlannedDrafter(PROMPT + plain, plan, engine.vocab_size)
    tokens, stats = run(engine, drafter, SpeculativeDecodingOptions(most, align, True))
    assert tokens == plain
    assert stats.forwards == stats.rounds
    assert sum(rounds for _, rounds in stats.draft_lengths) == stats.rounds
    assert sum(count * rounds for count, rounds in stats.draft_lengths) == stats.drafted
    assert sum(stats.tile_widths.values()) == stats.rounds
    assert all(count <= (N if most is None else most) for count, _ in stats.draft_lengths)


SCRIPT = [(7 * i + i * i // 5) % 96 + 2 for i in range(400)]


class Timed(ScriptedEngine):
    """A scripted engine on a clock that only forwards and drafts move."""

    now = 0.0

    def verify(self, block, *how):
        self.now += 1.0 + 0.05 * len(block)
        return super().verify(block, *how)


class Costly:
    """A drafter that is always wrong, takes its time, and remembers what it was asked for."""

    source = ("costly", 0)

    def __init__(self, engine):
        self.engine = engine
        self.asked = []

    def propose(self, history, budget):
        self.asked.append(budget)
        self.engine.now += 0.2 * budget
        return [1] * budget

    def commit(self, length):
        pass

    def reset(self):
        pass


@pytest.mark.usefixtures("adaptive_by_default")
def test_an_engine_that_cannot_be_measured_adapts_by_its_rounds():
    text = SCRIPT[:60] * 3
    engine = Timed(text, 100, width=16)
    tokens, stats = run(engine, PromptLookup(), prompt=text[:60], clock=lambda: engine.now)
    assert tokens[:-1] == text[60:]
    assert stats.accepted > 80
    assert stats.tokens_per_forward > 4


@pytest.mark.usefixtures("adaptive_by_default")
def test_a_drafter_that_does_not_pay_is_parked_and_parked_rounds_are_counted_and_said():
    engine = Timed(SCRIPT, 100)
    drafter = Costly(engine)
    tokens, stats = run(engine, drafter, prompt=SCRIPT[:10], clock=lambda: engine.now)
    assert tokens[:-1] == SCRIPT[10:]
    asked = sum(budget > 0 for budget in drafter.asked)
    assert 0 < asked < 20
    assert stats.parked_rounds >= stats.rounds - asked - 2
    assert f"{stats.parked_rounds} rounds parked" in stats.summary()
    assert stats.as_dict()["parked_rounds"] == stats.parked_rounds
    # Plain decoding would have taken 1.05 seconds a token.
    assert engine.now < 1.05 * len(tokens) / 0.98


@pytest.mark.usefixtures("adaptive_by_default")
def test_a_parked_drafter_of_a_chain_is_not_asked_while_the_others_are():
    engine = Timed(SCRIPT[:100] * 3, 100)
    costly = Costly(engine)
    chain = Chain(PromptLookup(), costly)
    tokens, stats = run(engine, chain, prompt=SCRIPT[:10], clock=lambda: engine.now)
    assert tokens[:-1] == (SCRIPT[:100] * 3)[10:]
    assert sum(budget > 0 for budget in costly.asked) < 20
    assert stats.accepted > 120
    # Of its own accord a chain asks all of its drafters for as much as it is asked.
    run(engine, chain, SpeculativeDecodingOptions(5), prompt=SCRIPT[:10])
    assert costly.asked[-20:].count(5) > 5


@pytest.mark.usefixtures("adaptive_by_default")
def test_what_rounds_show_of_an_engines_costs_holds_for_the_next_text():
    engine = Timed(SCRIPT[:60] * 3, 100, width=16)
    engine.tile_costs = TileCosts(((1, 1.0), (16, 1.2)))
    engine.learn_tile_costs = lambda costs: setattr(engine, "tile_costs", costs)
    for _ in range(2):
        engine.reset(0)
        run(engine, PromptLookup(), prompt=SCRIPT[:60], clock=lambda: engine.now)
    learnt = engine.tile_costs
    assert learnt.of(16) / learnt.of(1) == pytest.approx(1.8 / 1.05, rel=0.15)


@pytest.mark.usefixtures("adaptive_by_default")
@pytest.mark.parametrize(
    ("options", "adapts", "most"),
    [
        ({}, True, None),
        ({"num_draft_tokens": 5}, False, 5),
        ({"num_draft_tokens": 5, "adaptive": True}, True, 5),
        ({"adaptive": False}, False, 7),
        ({"num_draft_tokens": 5, "adaptive": False}, False, 5),
        ({"num_draft_tokens": 0}, False, 0),
        ({"num_draft_tokens": 0, "adaptive": True}, False, 0),
    ],
)
def test_a_number_means_that_many_and_none_means_as_many_as_pay(options, adapts, most):
    chosen = SpeculativeDecodingOptions(**options)
    assert (chosen.adapts, chosen.most_draft_tokens) == (adapts, most)


def test_what_is_no_answer_to_whether_to_adapt_is_refused():
    with pytest.raises(ValueError, match="adaptive: expected True, False or None, got 1"):
        SpeculativeDecodingOptions(adaptive=1)


@pytest.mark.usefixtures("adaptive_by_default")
def test_the_keyword_arguments_decide_whether_the_count_adapts():
    model = tiny_model("llama")
    lengths = {}
    for name, options in {
        "unset": {},
        "seven": {"adaptive_draft_count": False},
        "three": {"num_draft_tokens": 3},
        "at most three": {"num_draft_tokens": 3, "adaptive_draft_count": True},
    }.items():
        stats = SpeculationStats()
        prompt = [1, 2, 3, 4, 5, 6] * 5
        list(
            mlxspec.generate_step(
                prompt, model, prompt_lookup=True, max_tokens=40, stats=stats, **options
            )
        )
        lengths[name] = {count for count, _ in stats.draft_lengths}
    assert max(lengths["seven"]) == 7
    assert max(lengths["three"]) == 3
    assert max(lengths["at most three"]) <= 3
