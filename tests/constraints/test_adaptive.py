"""What is forced is drafted whatever the adaptive count says of a guess, and teaches it nothing."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import SpeculationStats, SpeculativeDecoder, SpeculativeDecodingOptions
from mlxspec.constraints.acceptance import ConstrainedChoice
from mlxspec.constraints.drafting import ConstrainedDrafter
from mlxspec.constraints.lookahead import Lookahead
from mlxspec.decoding.sampling import Sampling, noise_key
from tests.decoding.test_adaptive_decoding import SCRIPT, Costly, Timed

VOCAB = 100
BEGIN = 10


class SixOfTen:
    """Forces six tokens of every ten of the script, and allows every token in between."""

    end_tokens = ()

    def matcher(self):
        class Matcher:
            count = 0

            def allowed(self):
                if self.count % 10 < 6:
                    return np.arange(VOCAB) == SCRIPT[BEGIN + self.count]
                return np.ones(VOCAB, bool)

            def consume(self, token):
                self.count += 1

            def rollback(self, count):
                self.count -= count

        return Matcher()


def run(drafter_of, count=300):
    engine = Timed(SCRIPT, VOCAB, width=16)
    stats = SpeculationStats()
    lookahead = Lookahead(SixOfTen(), VOCAB)
    drafter = drafter_of(engine)
    decoder = SpeculativeDecoder(
        engine,
        ConstrainedDrafter(drafter, lookahead),
        SpeculativeDecodingOptions(adaptive=True),
        acceptance=ConstrainedChoice(lookahead, Sampling(), noise_key(0), stats),
        stats=stats,
        clock=lambda: engine.now,
    )
    emissions = list(decoder.generate(SCRIPT[:BEGIN], max_tokens=count))
    assert [emission.token for emission in emissions] == SCRIPT[BEGIN : BEGIN + count]
    return drafter, stats, engine


class Always(Costly):
    """Guesses right, and takes no time."""

    def propose(self, history, budget):
        self.asked.append(budget)
        return SCRIPT[len(history) : len(history) + budget]


@pytest.mark.parametrize("drafter_of", [lambda engine: None, Costly], ids=["none", "parked"])
def test_forced_tokens_are_drafted_though_guesses_are_not(drafter_of):
    """Four rounds for ten tokens: six forced and the one after them in one, three one by one."""
    drafter, stats, _ = run(drafter_of)
    assert stats.forced == 180
    assert stats.accepted >= 180 - 6
    if drafter is None:
        assert (stats.drafted, stats.rounds) == (180, 120)
        assert stats.parked_rounds == 0
    else:
        asked = sum(budget > 0 for budget in drafter.asked)
        assert 0 < asked < 20, "it was parked, and stayed parked between forced tokens"
        assert stats.rounds <= 120 + asked


def test_forced_tokens_do_not_recommend_the_guesses_that_follow_them():
    """A wrong drafter would look six tenths right, if what came before its guess were its own."""
    _, _, engine = run(Costly)
    _, _, other = run(lambda engine: None)
    assert engine.now < other.now + 4


def test_right_guesses_after_forced_tokens_share_their_forward():
    _, stats, _ = run(Always)
    _, alone, _ = run(lambda engine: None)
    assert stats.rounds < alone.rounds / 3
    assert stats.accepted == stats.drafted
