"""What the adaptive draft count promises, on a virtual clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulate import (
    CURVES,
    FLOOR,
    AgreementText,
    Curve,
    LookupText,
    decode,
    recorded_draft_texts,
    recorded_texts,
)
from mlxspec.drafting import AdaptiveDraftCount
from mlxspec.engine.costs import TileCosts

LENGTH = 200
LADDER = (1, 2, 4, 8, 16, 32)
# A row more costs next to nothing; every row costs as much as the first.
FLAT = TileCosts(((1, 1.0), (32, 1.5)))
LINEAR = TileCosts(((1, 1.0), (32, 32.0)))


def luck_of(runs):
    """Right and wrong in turns, for as long as a text."""
    agrees = [i % 2 == 0 for i, length in enumerate(runs) for _ in range(length)]
    return (agrees * (LENGTH // len(agrees) + 1))[:LENGTH]


def curve_of(steps):
    """Each width of the ladder costs so much more than the one before."""
    costs, cost = [], 0.0
    for width, step in zip(LADDER, (1.0, *steps), strict=True):
        cost += step
        costs.append((width, cost))
    return Curve("drawn", TileCosts(tuple(costs)), LADDER, "drawn")


@given(
    runs=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    steps=st.lists(st.floats(0.0, 8.0), min_size=5, max_size=5),
    price=st.sampled_from([0.0, 0.05, 0.3]),
    evidence=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    catch_up=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
)
def test_no_luck_on_no_curve_costs_more_than_two_percent_of_plain(
    runs, steps, price, evidence, catch_up
):
    by_position = (evidence * LENGTH)[:LENGTH]
    text = AgreementText("drawn", luck_of(runs), price, None if price else by_position)
    curve = curve_of(steps)
    assert LENGTH / decode(text, curve, catch_up=catch_up).seconds >= FLOOR


@pytest.mark.parametrize(("behind", "asked"), [(0.0, True), (2.0, True), (5.0, False)])
def test_a_parked_model_is_asked_only_where_the_text_can_bear_what_it_has_to_take_in(behind, asked):
    """Four plain steps, before any is earned."""
    adaptive = AdaptiveDraftCount(FLAT)
    history, wanted = [1], []
    for _ in range(40):
        adaptive.begin(history, 31, width_of)
        budget = adaptive.budget("model", 0.3, behind * FLAT.of(1))
        wanted.append(budget > 0)
        adaptive.keep(("model", 0), 0, 0.0)
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=FLAT.of(1))
        history.append(1)
    assert any(wanted) is asked
    assert asked or not adaptive.awaits


@pytest.mark.parametrize("behind", [0.0, 1.0])
def test_a_model_that_takes_its_time_and_proposes_nothing_costs_no_more_than_any(behind):
    """As one in doubt from its first token on, or one whose guesses a grammar forbids."""
    adaptive = AdaptiveDraftCount(FLAT)
    history, plain, spent = [1], FLAT.of(1), 0.0
    for _ in range(LENGTH):
        adaptive.begin(history, 31, width_of)
        seconds = 0.3 * adaptive.budget("model", 0.3, behind)
        seconds += behind * (seconds > 0)
        adaptive.keep(("model", 0), 0, seconds)
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=plain)
        spent += plain + seconds
        history.append(1)
    assert spent > LENGTH * plain
    assert LENGTH * plain / spent >= FLOOR


def test_a_model_that_proposes_nothing_is_charged_though_lookup_is_asked_after_it():
    adaptive = AdaptiveDraftCount(FLAT)
    history, plain, spent, asked = [1], FLAT.of(1), 0.0, 0
    for _ in range(LENGTH):
        adaptive.begin(history, 31, width_of)
        wanted = adaptive.budget("model", 0.3, 0.2) > 0
        asked += wanted
        assert adaptive.budget("lookup") == 31
        seconds = 0.5 * wanted
        assert adaptive.keep(("lookup", 3), 1, seconds, [9]) in (0, 1)
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=plain)
        spent += plain + seconds
        history.append(1)
    assert 0 < asked < 20
    assert LENGTH * plain / spent >= FLOOR


def test_where_plain_steps_become_dearer_farther_out_drafts_still_pay():
    adaptive = AdaptiveDraftCount(TileCosts(((1, 1.0), (2, 1.3), (32, 2.0))))
    history = [1]
    for _ in range(600):
        adaptive.begin(history, 0, lambda k: 2 if k < 2 else 32, plain_width=2)
        adaptive.budget("model", 0.02)
        adaptive.keep(("model", 0), 0, 0.0)
        adaptive.record(drafted=0, accepted=0, emitted=1, width=2, seconds=1.3)
        history.append(1)
    adaptive.begin(history, 31, lambda k: 2 if k < 2 else 32, plain_width=2)
    assert adaptive.budget("model", 0.02) > 0


def test_what_a_model_took_in_is_no_part_of_what_its_tokens_cost():
    adaptive = AdaptiveDraftCount(FLAT)
    adaptive.begin([1], 31, width_of)
    assert adaptive.budget("model", 0.05, 2.0) > 0
    assert adaptive.keep(("model", 0), 3, 2.15) == 3
    adaptive.record(drafted=3, accepted=3, emitted=4, width=4, seconds=FLAT.of(4))
    adaptive.begin([1] * 5, 31, width_of)
    assert adaptive.budget("model", 0.05, 0.0) > 3


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_no_recorded_draft_model_costs_more_than_two_percent_of_plain(curve):
    plain = curve.costs.of(curve.ladder[0])
    for text in recorded_draft_texts():
        assert text.length * plain / decode(text, curve).seconds >= FLOOR, text.name


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_a_drafter_that_is_always_wrong_is_soon_left_alone(curve):
    wrong = [False] * 1000
    for text in (
        AgreementText("lookup", wrong, 0.0, [8] * 1000),
        AgreementText("model", wrong, 0.1),
    ):
        plain = curve.costs.of(curve.ladder[0])
        run = decode(text, curve)
        dear = sum(n for width, n in run.widths.items() if curve.costs.of(width) > 1.05 * plain)
        assert dear < 20
        assert 1000 * plain / run.seconds > 0.985


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_what_repeats_is_gained_wherever_a_tile_is_cheaper_than_its_rows(curve):
    story = [(7 * i + i * i // 5) % 999 for i in range(300)]
    run = decode(LookupText("copy", [*story, 1000], story[5:]), curve)
    least = min(curve.costs.of(width) / width for width in curve.ladder) / curve.costs.of(1)
    assert len(story[5:]) * curve.costs.of(1) / run.seconds > 0.75 / least


def width_of(drafts):
    return next(width for width in LADDER if width > drafts)


def rounds(adaptive, plan, *, name="lookup", evidence=8, limit=31):
    """Let a controller decide; every round's draft is right or not, as the plan says."""
    history = [1]
    asked, kept = [], []
    for right in plan:
        adaptive.begin(history, limit, width_of)
        budget = adaptive.budget(name)
        seconds = 0.2 * budget if name == "model" else 0.0
        count = adaptive.keep((name, evidence), budget, seconds, [1 if right else 0] * budget)
        emitted = 1 + (count if right else 0)
        adaptive.record(
            drafted=count,
            accepted=emitted - 1,
            emitted=emitted,
            width=width_of(count),
            seconds=FLAT.of(width_of(count)),
        )
        history += [1] * emitted
        asked.append(budget)
        kept.append(count)
    return asked, kept


def test_a_long_match_is_drafted_long_at_once_and_a_short_one_is_not():
    def first(costs, evidence):
        return rounds(AdaptiveDraftCount(costs), [True], evidence=evidence)[1][0]

    assert first(FLAT, 8) > 15
    assert first(FLAT, 3) < first(FLAT, 8)
    assert first(LINEAR, 8) == first(LINEAR, 30) == 0


def test_a_draft_fills_the_tile_that_is_paid_for():
    _, kept = rounds(AdaptiveDraftCount(FLAT), [True, False] * 20)
    assert set(kept) <= {width - 1 for width in LADDER}
    assert max(kept) > 0


def test_a_parked_lookup_drafts_again_once_its_guesses_come_true():
    adaptive = AdaptiveDraftCount(FLAT)
    _, kept = rounds(adaptive, [False] * 80)
    assert kept[-20:] == [0] * 20
    _, kept = rounds(adaptive, [True] * 40)
    assert any(kept)
    assert all(kept[kept.index(max(kept)) :])


def test_a_parked_draft_model_is_asked_for_nothing_but_now_and_then_and_ever_rarer():
    adaptive = AdaptiveDraftCount(FLAT)
    asked, _ = rounds(adaptive, [False] * 300, name="model", evidence=0)
    trials = [i for i, budget in enumerate(asked) if budget]
    assert len(trials) < 20
    gaps = [b - a for a, b in pairwise(trials)]
    assert gaps[-1] > 60
    asked, _ = rounds(adaptive, [True] * 300, name="model", evidence=0)
    assert all(asked[-10:])


def test_while_a_step_is_under_way_a_draft_model_is_asked_for_nothing_and_then_for_what_pays():
    adaptive = AdaptiveDraftCount(FLAT)
    adaptive.begin([1], 31, width_of, begun=True)
    assert adaptive.budget("model", 0.02) == 0
    assert adaptive.awaits
    assert not adaptive.rests
    adaptive.begin([1, 1], 31, width_of)
    assert adaptive.budget("model", 0.02) > 0


def test_a_trial_waits_for_a_round_that_has_not_begun():
    adaptive = AdaptiveDraftCount(FLAT)
    asked, _ = rounds(adaptive, [False] * 60, name="model", evidence=0)
    assert any(asked)
    for _ in range(100):
        adaptive.begin([1], 31, width_of, begun=True)
        assert adaptive.budget("model") == 0
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=1.0)
    assert adaptive.awaits
    adaptive.begin([1], 31, width_of)
    assert adaptive.budget("model") > 0


@pytest.mark.parametrize("certain", [0, 1])
def test_a_draft_model_dearer_than_the_target_itself_is_never_asked(certain):
    adaptive = AdaptiveDraftCount(FLAT)
    history = [1]
    for _ in range(300):
        adaptive.begin(history, 31, width_of, certain)
        assert adaptive.budget("model", 2.0 * FLAT.of(1)) == 0
        assert adaptive.parked
        assert adaptive.keep(("model", 0), 0, 0.0) == 0
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=FLAT.of(1))
        history.append(1)


def test_one_slow_round_and_one_that_traced_change_no_length():
    def lengths(slow, usual):
        adaptive = AdaptiveDraftCount(FLAT)
        rounds(adaptive, [True] * 5)
        adaptive.begin([1] * 1000, 31, width_of)
        adaptive.record(
            drafted=0,
            accepted=0,
            emitted=1,
            width=32,
            seconds=slow,
            usual=usual,
        )
        return rounds(adaptive, [True] * 20)[1]

    assert lengths(100.0, True) == lengths(1.5, True)
    assert lengths(1e6, False) == lengths(1.5, True)


@pytest.mark.parametrize("price", [0.0, 0.1])
@pytest.mark.parametrize("period", [2, 3, 5, 9])
def test_measured_rounds_correct_a_wrong_curve(period, price):
    # Every row costs as much as the first, and rows are believed to cost next to nothing: where
    # plain steps are never met, all that could be learnt is that everything costs more.
    linear = Curve("linear", LINEAR, LADDER, "")
    agrees = [i % period != period - 1 for i in range(1000)]
    text = AgreementText("drawn", agrees, price, None if price else [8] * 1000)
    believed = decode(text, linear, believed=FLAT)
    assert 1000 / believed.seconds > 0.8


@pytest.mark.parametrize("text", recorded_texts(), ids=lambda text: text.name)
def test_a_curve_that_was_measured_on_a_busy_machine_is_found_out(text):
    curve = CURVES[0]
    busy = TileCosts(((1, 91.0), (2, 147.0), (4, 372.0)))
    assert busy.of(8) > 4 * curve.costs.of(8)
    found_out = decode(text, curve, believed=busy).seconds
    assert text.length * curve.costs.of(1) / found_out >= FLOOR
    assert found_out < 1.5 * decode(text, curve).seconds


@pytest.mark.parametrize("factor", [0.1, 0.3, 3.5, 10.0])
@pytest.mark.parametrize("text", recorded_texts(), ids=lambda text: text.name)
def test_a_machine_slower_or_faster_than_when_it_was_measured_drafts_as_much(text, factor):
    # The first steps of most texts are plain: what they show of the machine holds for all widths.
    curve = CURVES[2]
    scaled = TileCosts(tuple((width, factor * cost) for width, cost in curve.costs.seconds))
    found_out = decode(text, curve, believed=scaled).seconds
    assert found_out < 1.15 * decode(text, curve).seconds


def test_plain_steps_quicker_than_measured_do_not_make_drafts_look_dear():
    adaptive = AdaptiveDraftCount(TileCosts(((1, 0.45), (2, 0.57), (4, 0.88), (8, 1.34))))
    for _ in range(20):
        adaptive.begin([1], 0, width_of)
        adaptive.keep(("lookup", 3), 0, 0.0, [])
        adaptive.record(drafted=0, accepted=0, emitted=1, width=1, seconds=0.128)
    found = adaptive.costs()
    assert found.of(1) == pytest.approx(0.128, rel=0.01)
    assert found.of(8) / found.of(1) == pytest.approx(1.34 / 0.45)
    _, kept = rounds(adaptive, [True] * 20, limit=7)
    assert max(kept) == 7
