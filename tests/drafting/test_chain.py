"""A chain: the first that has something to say is heard, and every one is told what came of it."""

from __future__ import annotations

import pytest

from mlxspec import (
    Chain,
    Drafter,
    DraftModel,
    PromptLookup,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
)
from mlxspec.drafting import TargetedDrafter
from mlxspec.drafting.protocol import source_of
from tests.families.tiny import tiny_model
from tests.scripted import ScriptedEngine


class Says:
    """Proposes one thing, and writes down what it is told."""

    def __init__(self, *proposal):
        self.proposal = list(proposal)
        self.told = []

    def propose(self, history, budget):
        self.told.append(("propose", len(history), budget))
        return self.proposal[:budget]

    def commit(self, length):
        self.told.append(("commit", length))

    def reset(self):
        self.told.append(("reset",))


def test_the_first_proposal_wins_and_later_drafters_are_not_asked():
    mute, first, second = Says(), Says(4, 5), Says(6)
    chain = Chain(mute, first, second)
    assert isinstance(chain, Drafter)
    assert chain.propose([1, 2], 3) == [4, 5]
    assert mute.told == first.told == [("propose", 2, 3)]
    assert second.told == []
    assert Chain(Says(), Says()).propose([1], 3) == []


def test_all_are_told_of_commits_and_resets():
    parts = [Says(1), Says(2)]
    chain = Chain(*parts)
    chain.reset()
    chain.commit(7)
    assert [part.told for part in parts] == [[("reset",), ("commit", 7)]] * 2


def test_the_source_is_that_of_the_part_that_answered():
    chain = Chain(PromptLookup(2), Says(9))
    assert chain.propose([1, 2, 3, 1, 2, 3], 2) == [1, 2]
    assert chain.source == source_of(chain) == ("lookup", 3)
    assert chain.propose([1, 2, 3], 2) == [9]
    assert chain.source == ("Says", 0)


def test_a_chain_holds_the_draft_models_in_it_and_counts_their_forwards():
    model = DraftModel(tiny_model("llama"))
    chain = Chain(PromptLookup(), Chain(model))
    assert isinstance(chain, TargetedDrafter)
    with chain.lease():
        assert model.engine.leased
        draft = chain.propose([5, 9, 2], 3)
        assert len(draft) == 3
        assert chain.source == ("model", 0)
        assert chain.forward_count == model.forward_count == 3
    assert not model.engine.leased


def test_every_part_is_given_the_budget_of_its_own_source():
    lookup, dear = PromptLookup(2), Says(9, 9, 9)
    for chain in (Chain(lookup, dear), Chain(Chain(lookup), Chain(dear))):
        chain.reset()
        chain.budget_of = lambda name, seconds, behind: {"lookup": 4, "Says": 0}[name]
        assert chain.propose([1, 2, 3], 8) == []
        assert dear.told[-1] == ("propose", 3, 0)
        assert chain.propose([1, 2, 3, 4, 1, 2], 8) == [3, 4, 1, 2]
        chain.budget_of = lambda name, seconds, behind: {"lookup": 4, "Says": 2}[name]
        chain.reset()
        assert chain.propose([7], 8) == [9, 9]


def test_lookup_drafts_though_the_model_behind_it_never_pays():
    """The model is always wrong and dear; the text repeats itself after a while."""
    text = [*range(10, 40), *range(2, 9), *range(10, 40)]

    class Dear(Says):
        source = ("model", 0)

        def propose(self, history, budget):
            engine.now += 0.3 * budget
            return [1] * budget

    class Timed(ScriptedEngine):
        now = 0.0

        def verify(self, block, *how):
            self.now += 1.0 + 0.01 * len(block)
            return super().verify(block, *how)

    engine = Timed(text, 50)
    decoder = SpeculativeDecoder(
        engine,
        Chain(PromptLookup(), Dear()),
        SpeculativeDecodingOptions(adaptive=True),
        clock=lambda: engine.now,
    )
    tokens = [emission.token for emission in decoder.generate(text[:4], max_tokens=60)]
    assert tokens == text[4:64]
    assert decoder.stats.accepted >= 20
    assert decoder.stats.parked_rounds


def test_what_is_no_drafter_is_refused():
    with pytest.raises(ValueError, match="at least one drafter"):
        Chain()
    with pytest.raises(TypeError, match="expected drafters with propose, commit and reset, got 7"):
        Chain(PromptLookup(), 7)
