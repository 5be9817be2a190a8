"""`verify` finds a planted fault, and says where it is: the width, the position, the margin."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec import RewindRefused, StaticShapeEngine
from mlxspec.cli.verify import table
from mlxspec.engine.reach import Reach
from mlxspec.engine.state import RingRule, TileFrame
from mlxspec.verification import verify_model
from tests.cases import varied_model
from tests.families.tiny import tiny_model

PROMPT = [5, 9, 2, 6, 5, 9, 2, 6]
WINDOW = 16
# Past what engines look at when they choose their widths, so that the fault is in use.
LATE = 26
MODEL = tiny_model("llama")
RIGHT_RULE = RingRule.for_decoding


def verified(model, **options):
    options = {"max_context_length": 128, "span_step": 64, "max_tokens": 40} | options
    return verify_model(model, PROMPT, widened=False, **options)


def faults(verdict):
    return {(check.place, check.name): check for check in verdict.checks if check.failed}


def one_ulp_up(number: mx.array) -> mx.array:
    """The next larger float32."""
    return mx.array(np.nextafter(np.array(number), np.float32(np.inf)))


def plant_ulp(monkeypatch, width, row, logit, late=LATE):
    """Tiles of one width get one logit of one row, late in the sequence, one ulp too large."""
    right = StaticShapeEngine.verify

    def wrong(self, block, *arguments, **how):
        begin = self.processed_token_count
        rows = right(self, block, *arguments, **how)
        tile = next(w for w in self.tile_widths if w >= len(block)) if len(block) <= 16 else 0
        if rows.logits is None or tile != width or row >= len(block) or begin + row < late:
            return rows
        changed = rows.logits.at[row, logit].add(0)
        changed[row, logit] = one_ulp_up(rows.logits[row, logit])
        return replace(rows, logits=changed)

    monkeypatch.setattr(StaticShapeEngine, "verify", wrong)


@pytest.mark.parametrize(
    ("width", "row", "logit", "ladder"),
    [(2, 1, 63, (1, 2)), (8, 5, 0, None), (16, 15, 31, (1, 16))],
)
def test_one_ulp_in_one_logit_of_one_row_is_found_and_located(width, row, logit, ladder):
    located(width, row, logit, ladder)


@pytest.mark.deep
@settings(max_examples=30)
@given(st.sampled_from([2, 4, 8, 16]), st.data())
def test_one_ulp_is_located_in_any_row_of_any_width(width, data):
    row = data.draw(st.integers(0, width - 1), label="row")
    located(width, row, data.draw(st.integers(0, 63), label="logit"), None)


def located(width, row, logit, ladder):
    """Plant one ulp, verify, and look for it in the verdict."""
    with pytest.MonkeyPatch.context() as patch:
        plant_ulp(patch, width, row, logit)
        verdict = verified(MODEL, up_to=1, tile_widths=ladder)
    assert not verdict.passed
    named = {check.name: check for check in verdict.checks}
    found = named[f"scored in tiles of {width}"]
    assert found.failed
    assert (found.difference.width, found.difference.row) == (width, row)
    assert (found.difference.at_logit, found.difference.ulps) == (logit, 1)
    assert found.difference.logits == 1
    # The row that follows position p chooses the token at p + 1.
    assert found.difference.position > LATE
    assert found.difference.position == found.difference.token + len(PROMPT)
    for said in (f"position {found.difference.position}", f"row {row} of a tile of {width}"):
        assert said in found.detail
    assert "(1 ulp)" in found.detail
    assert "ahead" in found.detail
    for other in verdict.widths:
        assert named[f"scored in tiles of {other}"].failed is (other == width)
    assert "FAULT" in table("m", verdict)


def test_a_fault_that_keeps_a_width_out_of_the_class_is_named_and_fails_nothing(monkeypatch):
    # Measured here, and remembered for nobody.
    monkeypatch.setattr("mlxspec.engine.survey.remembered_classes", lambda circumstances: None)
    monkeypatch.setattr("mlxspec.engine.survey.remember_classes", lambda *measured: None)
    plant_ulp(monkeypatch, 4, 2, 7, late=0)
    verdict = verified(MODEL, up_to=1)
    assert verdict.widths == (1, 2, 8, 16)
    assert not [group for group in verdict.classes if 4 in group]
    assert verdict.passed
    (check,) = [check for check in verdict.checks if check.status != "equal"]
    assert check.name == "scored in tiles of 4"
    assert (check.status, check.in_use) == ("near tie", False)
    assert "not in use" in table("m", verdict)


def windowed():
    return varied_model("gemma3_text", sliding_window=WINDOW)


def verified_past_the_window():
    return verified(windowed(), max_tokens=4, span_step=256, tile_widths=(1, 4, 16))


class ShortRing(RingRule):
    """A ring one slot short of what its widest tile needs, whose rule does not know."""

    def last_write(self, start: int) -> int:
        """As if it were as deep as it ought to be."""
        return RIGHT_RULE(self.window, 16).last_write(start)


def test_a_ring_one_slot_short_is_found_past_the_window(monkeypatch):
    short = staticmethod(lambda window, widest: ShortRing(window, window - 2 + widest))
    monkeypatch.setattr(RingRule, "for_decoding", short)
    verdict = verified_past_the_window()
    assert not verdict.passed
    check = faults(verdict)[f"window of {WINDOW}", "scored in tiles of 16"]
    # The first row of the widest tile sees its oldest key overwritten, once the ring is full.
    assert (check.difference.width, check.difference.row) == (16, 0)
    assert check.difference.position > WINDOW
    for width in (1, 4):
        key = (f"window of {WINDOW}", f"scored in tiles of {width}")
        assert key not in faults(verdict)


def test_a_ring_whose_rule_knows_that_it_is_short_is_found_by_what_it_refuses(monkeypatch):
    short = staticmethod(lambda window, widest: RingRule(window, window - 2 + widest))
    monkeypatch.setattr(RingRule, "for_decoding", short)
    found = faults(verified_past_the_window())
    assert {place for place, _ in found} == {f"window of {WINDOW}"}
    for check in found.values():
        assert check.detail.startswith("at position ")
        assert "sliding windows could not go back" in check.detail


def test_a_rule_that_takes_its_ring_for_one_slot_deeper_is_found(monkeypatch):
    right = RingRule.last_write
    monkeypatch.setattr(RingRule, "last_write", lambda self, start: right(self, start) + 1)
    verdict = verified_past_the_window()
    found = faults(verdict)
    assert found
    assert {place for place, _ in found} == {f"window of {WINDOW}"}
    assert all("over several tiles" in name for _, name in found)


@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_mask_lost_past_the_window_is_found_in_the_width_that_lost_it(monkeypatch, width):
    right = TileFrame.ring_mask

    def wrong(self, window, depth, slots):
        if self.width != width:
            return right(self, window, depth, slots)
        return right(self, depth, depth, slots)

    monkeypatch.setattr(TileFrame, "ring_mask", wrong)
    verdict = verified_past_the_window()
    assert not verdict.passed
    found = faults(verdict)
    assert {place for place, _ in found} == {f"window of {WINDOW}"}
    if width == 1:
        # Plain decoding is itself wrong, and all that is right is unlike it.
        assert (f"window of {WINDOW}", "mlx-lm's own rows") in found
        return
    check = found[f"window of {WINDOW}", f"scored in tiles of {width}"]
    assert check.difference.width == width
    assert check.difference.position > WINDOW
    others = {1, 4, 16} - {width}
    assert not {n for _, n in found} & {f"scored in tiles of {w}" for w in others}


def test_a_mask_lost_in_every_width_is_found_by_mlx_lms_rows(monkeypatch):
    right = TileFrame.ring_mask
    # Twice the window: no tile sees what is not there, and all agree.
    monkeypatch.setattr(
        TileFrame,
        "ring_mask",
        lambda self, window, depth, slots: right(self, window + 4, depth, slots),
    )
    verdict = verified_past_the_window()
    check = faults(verdict)[f"window of {WINDOW}", "mlx-lm's own rows"]
    assert check.difference.position > WINDOW


def test_a_key_lost_from_a_mask_is_found_and_changes_the_choice_somewhere(monkeypatch):
    right = TileFrame.causal_mask

    def loses_a_key(self, window=None):
        mask = right(self, window)
        return mask.at[:, 1].multiply(False) if self.width == 4 else mask

    monkeypatch.setattr(TileFrame, "causal_mask", loses_a_key)
    verdict = verify_model(
        MODEL, PROMPT, max_context_length=64, span_step=16, max_tokens=24, tile_widths=(1, 4, 8)
    )
    assert {name for _, name in faults(verdict)} >= {"scored in tiles of 4"}


def test_a_check_that_raises_is_a_fault_with_its_place_and_no_crash(monkeypatch):
    right = StaticShapeEngine.verify

    def refuses(self, block, *arguments, **how):
        if len(block) == 8 and self.processed_token_count > LATE:
            raise RewindRefused("planted")
        return right(self, block, *arguments, **how)

    monkeypatch.setattr(StaticShapeEngine, "verify", refuses)
    verdict = verified(MODEL, up_to=1)
    check = faults(verdict)["prompt", "scored in tiles of 8"]
    assert check.detail.startswith("at position ")
    assert "RewindRefused: planted" in check.detail
    assert "scored in tiles of 4" not in {name for _, name in faults(verdict)}


def test_an_engine_that_cannot_rewind_is_a_fault_and_no_crash(monkeypatch):
    reason = "planted"
    monkeypatch.setattr(Reach, "why_no_rewind", lambda self, to: reason if to > LATE else None)
    verdict = verified(MODEL, up_to=1)
    assert not verdict.passed
    assert "drafted by a drafter always wrong" in {name for _, name in faults(verdict)}
