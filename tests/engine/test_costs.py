"""What a tile costs is measured within bounds, remembered, and changes no bit."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import StaticShapeEngine
from mlxspec.engine.costs import (
    BUDGET_IN_STEPS,
    CANDIDATE_WIDTHS,
    TileCosts,
    measure_costs,
    remember_costs,
    remembered_costs,
    tile_widths_that_pay,
)
from mlxspec.engine.exactness import remember_classes, remembered_classes
from mlxspec.engine.protocol import Capture
from tests.cases import varied_model
from tests.families.tiny import tiny_model

CHEAP_ROWS = TileCosts(tuple((width, 1.0 + 0.01 * width) for width in CANDIDATE_WIDTHS))
PROMPT = [5, 6, 7, 8, 9] * 6


class TimedEngine:
    """An engine whose tiles cost what a table says, on a clock of its own."""

    vocab_size = 100
    processed_token_count = 1
    max_verify_block_length = 1000
    one_forward_draft_budget = 999

    def __init__(self, seconds_of):
        self.seconds_of = seconds_of
        self.now = 0.0
        self.traced = set()
        self.spent = 0.0

    def verify(self, block):
        seconds = self.seconds_of(len(block))
        self.spent += seconds
        self.now += seconds + (0 if len(block) in self.traced else 1000)
        self.traced.add(len(block))

    def reset(self, to):
        pass

    def clock(self):
        return self.now


@given(
    slope=st.floats(0.0, 1.0),
    jumps=st.dictionaries(st.sampled_from(CANDIDATE_WIDTHS[1:]), st.floats(0, 6)),
)
def test_a_measurement_costs_at_most_25_steps_beside_tracing(slope, jumps):
    def seconds_of(width):
        return 1.0 + slope * (width - 1) + sum(j for w, j in jumps.items() if w <= width)

    engine = TimedEngine(seconds_of)
    found = measure_costs(engine, CANDIDATE_WIDTHS, engine.clock)
    # The last width may turn out dearer than the widths before it let expect.
    overrun = 3 * (seconds_of(max(found.widths)) if jumps else 0)
    assert engine.spent <= BUDGET_IN_STEPS * seconds_of(1) + 1 + overrun
    for width in found.widths:
        assert found.of(width) == pytest.approx(seconds_of(width))


def test_widening_stops_once_a_row_costs_no_less():
    linear = TimedEngine(lambda width: width / 10)
    assert max(measure_costs(linear, CANDIDATE_WIDTHS, linear.clock).widths) <= 4
    flat = TimedEngine(lambda width: 1 + width / 100)
    assert max(measure_costs(flat, CANDIDATE_WIDTHS, flat.clock).widths) == 64
    # Two rows may be dear where eight are cheap.
    late = TimedEngine(lambda width: min(width, 2.2))
    assert max(measure_costs(late, CANDIDATE_WIDTHS, late.clock).widths) >= 16


def test_the_wide_tiles_are_reached_where_one_row_is_quick():
    """SmolLM2 in float32 under OpenBLAS on two cores: rows get cheaper up to 32 of them."""
    costs = TileCosts(
        ((1, 0.048), (2, 0.057), (4, 0.067), (8, 0.078), (16, 0.102), (32, 0.175), (64, 0.36))
    )
    engine = TimedEngine(costs.of)
    found = measure_costs(engine, CANDIDATE_WIDTHS, engine.clock)
    assert engine.spent <= BUDGET_IN_STEPS * 0.048 + 0.1
    assert 32 in tile_widths_that_pay(found)


def test_widths_that_save_nothing_are_left_out():
    costs = TileCosts(((1, 1.0), (2, 1.5), (4, 1.51), (8, 3.1), (16, 3.0), (32, 9.0)))
    assert tile_widths_that_pay(costs) == (1, 4, 16)


def test_between_the_widths_measured_costs_lie_on_a_line():
    costs = TileCosts(((1, 1.0), (8, 2.4)))
    assert costs.of(4) == pytest.approx(1.6)
    assert costs.of(16) == pytest.approx(4.0)
    assert TileCosts(((8, 4.0),)).of(2) == pytest.approx(1.0)


def test_costs_are_measured_once_for_a_model_and_again_for_another(monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    calls = []
    monkeypatch.setattr(
        "mlxspec.engine.survey.measure_costs",
        lambda engine, widths: calls.append(widths) or TileCosts(((1, 1.0), (2, 1.5))),
    )

    def costs(model, **options):
        return StaticShapeEngine(model, max_context_length=77, **options).tile_costs

    first = costs(tiny_model("llama"))
    assert costs(tiny_model("llama", seed=1)) == first
    assert len(calls) == 1
    costs(tiny_model("qwen2"))
    costs(tiny_model("llama"), tile_widths=(1, 4))
    costs(tiny_model("llama"), span_step=16)
    costs(tiny_model("llama", dtype=mx.bfloat16))
    assert len(calls) == 5


def test_an_engine_is_measured_without_being_touched(monkeypatch):
    monkeypatch.setattr("mlxspec.engine.survey.remembered_costs", lambda circumstances: None)
    engine = StaticShapeEngine(tiny_model("gemma3_text"), max_context_length=100)
    engine.prefill(PROMPT)
    before = [mx.array(array) for array in engine._state.slots]
    calls, traces = engine.call_count, engine.trace_count
    costs = engine.tile_costs
    assert costs.widths[0] == 1
    assert all(seconds > 0 for _, seconds in costs.seconds)
    assert (engine.call_count, engine.trace_count) == (calls, traces)
    assert list(engine.tokens) == PROMPT
    assert all(map(mx.array_equal, before, engine._state.slots))


def cheap(monkeypatch):
    monkeypatch.setattr("mlxspec.engine.survey.remembered_costs", lambda circumstances: CHEAP_ROWS)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_default_ladder_is_widened_by_widths_that_compute_the_same_bits(family, monkeypatch):
    cheap(monkeypatch)
    engine = StaticShapeEngine(tiny_model(family), max_context_length=200, span_step=128)
    wide = engine.widened()
    assert wide.tile_widths[-1] == 64
    assert set(engine.tile_widths) < set(wide.tile_widths)
    rows = []
    for each in (engine, wide):
        each.prefill(PROMPT)
        # 40 rows: three tiles or so of the one, one or two of the other.
        rows.append(each.verify(range(1, 41), Capture(logits=True)))
    assert rows[0].forwards > rows[1].forwards
    assert mx.array_equal(rows[0].logits, rows[1].logits)
    assert wide.widened() is wide
    narrow = StaticShapeEngine(tiny_model(family), max_context_length=30, span_step=128)
    assert narrow.widened().tile_widths[-1] == 24


def test_widths_that_round_differently_are_left_out_unless_exactness_is_waived(monkeypatch):
    cheap(monkeypatch)
    monkeypatch.setattr("mlxspec.engine.survey.remembered_classes", lambda circumstances: None)
    monkeypatch.setattr("mlxspec.engine.survey.remember_classes", lambda *measured: None)
    own = (1, 2, 4, 8, 16)
    monkeypatch.setattr(
        "mlxspec.engine.survey.width_classes",
        lambda engine, widths: [(*own, 24), tuple(w for w in widths if w not in (*own, 24))],
    )
    monkeypatch.setattr("mlxspec.engine.static.best_class", lambda classes: own)
    model = tiny_model("llama")
    assert StaticShapeEngine(model).widened().tile_widths == (*own, 24)
    assert StaticShapeEngine(model, exact=False).widened().tile_widths[-1] == 64


def test_a_used_engine_is_widened_from_what_sequences_begin_in(monkeypatch):
    cheap(monkeypatch)
    monkeypatch.setattr(
        "mlxspec.engine.survey.WidthSurvey.classes_at",
        lambda survey, position, widths, *more, **how: ([widths[:3] if position else widths], True),
    )
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=1200)
    engine.prefill([1 + i % 50 for i in range(800)])
    engine._notes["copies"] = "every step is awaited"
    assert engine.tile_widths == (1, 2, 4)
    wide = engine.widened()
    assert {1, 2, 4, 8, 16, 64} <= set(wide.tile_widths)
    assert wide.note is None


def test_a_ladder_that_no_other_width_is_equal_to_stays_with_what_is_held(monkeypatch):
    cheap(monkeypatch)
    engine = StaticShapeEngine(tiny_model("llama"))
    engine.prefill(PROMPT)
    monkeypatch.setattr(
        "mlxspec.engine.survey.WidthSurvey.classes_at",
        lambda *where, **how: ([(1, 2, 4, 8, 16), (24, 32, 48, 64)], True),
    )
    assert engine.widened() is engine
    assert list(engine.tokens) == PROMPT


def test_a_wider_engine_has_the_options_of_the_one_before_and_says_its_own_widths(monkeypatch):
    cheap(monkeypatch)
    monkeypatch.setattr(
        "mlxspec.engine.survey.WidthSurvey.classes_at",
        lambda survey, position, widths, *more, **how: (
            [tuple(w for w in widths if w not in (1, 64))],
            True,
        ),
    )
    options = {"max_context_length": 5000, "initial_capacity": 4096}
    engine = StaticShapeEngine(tiny_model("llama"), **options)
    assert engine.note == (
        "tile widths 2, 4, 8, 16 of 1, 2, 4, 8, 16: the others round differently on this device"
    )
    wide = engine.widened()
    assert wide.capacity == 4096 + 48
    ours, all_of_them = ", ".join(map(str, wide.tile_widths)), "1, 2, 4, 8, 10, 16, "
    assert wide.tile_widths[-1] == 48
    assert f"tile widths {ours} of {all_of_them}" in wide.note
    assert "16: the others" not in wide.note


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tile_widths": (2, 8, 16)}),
        ("gemma3_text", {"tile_widths": (3, 8, 16)}),
        ("mamba2", {}),
        ("nemotron_h", {}),
        ("lfm2", {"tile_widths": (2, 4, 8, 16)}),
        ("rwkv7", {}),
    ],
)
@pytest.mark.parametrize(("length", "span_step"), [(28, 256), (300, 256), (300, 48), (300, 16)])
def test_what_is_timed_is_one_tile_of_the_width_asked_for(family, options, length, span_step):
    options = options | {"max_context_length": length, "span_step": span_step}
    engine = StaticShapeEngine(tiny_model(family), **options)
    asked, run, decode_tile = [], [], engine._decode_tile

    def noted_tile(position, stop, *more):
        tile = decode_tile(position, stop, *more)
        run.append((stop - position, tile.outputs[0].shape[1]))
        return tile

    verify = engine.verify

    def noted(block):
        asked.append(len(block))
        return verify(block)

    engine._decode_tile, engine.verify = noted_tile, noted
    costs = measure_costs(engine, engine.tile_widths)
    assert [rows for rows, _ in run] == asked
    assert {width for _, width in run} == set(costs.widths)
    room = min(length - 1, span_step) - costs.widths[0]
    assert {rows for rows, width in run if rows != width} <= {room}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"])
def test_costs_of_other_kernels_or_threads_are_not_taken_for_these(name, monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    options = {"max_context_length": 20, "tile_widths": (1, 2)}
    for value, known in (("1", False), ("1", True), ("2", False)):
        monkeypatch.setenv(name, value)
        engine = StaticShapeEngine(tiny_model("llama"), **options)
        assert engine.tile_costs.widths == (1, 2)
        assert engine.remembered == {"tile costs": known}
    assert not list(tmp_path.rglob("*.part"))


def test_costs_of_a_short_context_are_not_taken_for_those_of_a_long_one(monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    widths = {"tile_widths": (1, 2, 4, 8, 16)}
    for length, measured in ((4, (1, 2)), (100, widths["tile_widths"])):
        engine = StaticShapeEngine(tiny_model("llama"), max_context_length=length, **widths)
        assert engine.tile_costs.widths == measured
        again = StaticShapeEngine(tiny_model("llama"), max_context_length=length, **widths)
        assert again.tile_costs.widths == measured
        assert again.remembered == {"tile costs": True}


def test_a_price_of_exactness_above_five_percent_is_said(monkeypatch):
    monkeypatch.setattr("mlxspec.engine.survey.remember_classes", lambda *measured: None)
    monkeypatch.setattr("mlxspec.engine.survey.remembered_classes", lambda *measured: None)
    monkeypatch.setattr("mlxspec.engine.survey.width_classes", lambda *engine: [(1,), (4, 8, 16)])
    for cost, said in ((1.2, True), (1.02, False)):
        costs = TileCosts(((1, 1.0), (4, cost), (16, 2.0)))
        monkeypatch.setattr(
            "mlxspec.engine.survey.remembered_costs", lambda circumstances, costs=costs: costs
        )
        engine = StaticShapeEngine(tiny_model("llama"))
        assert engine.tile_widths == (4, 8, 16)
        assert engine.tile_costs is costs
        assert ("costs 1.20 of one" in engine.note) is said


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tile_widths": (1, 8)}),
        ("gemma3_text", {}),
        ("mamba2", {}),
    ],
)
def test_a_ladder_that_was_chosen_or_that_a_wider_one_would_disturb_stays(
    family, options, monkeypatch
):
    cheap(monkeypatch)
    engine = StaticShapeEngine(tiny_model(family), **options)
    assert engine.widened() is engine


@pytest.mark.usefixtures("adaptive_by_default")
def test_a_kept_engine_is_widened_for_plain_decoding_too(monkeypatch):
    cheap(monkeypatch)
    model = tiny_model("llama")
    options = {"max_context_length": 200, "max_tokens": 60}
    plain = [t for t, _, _ in mlxspec.generate_step(PROMPT, model, **options)]
    drafted = [t for t, _, _ in mlxspec.generate_step(PROMPT, model, prompt_lookup=True, **options)]
    again = [t for t, _, _ in mlxspec.generate_step(PROMPT, model, **options)]
    assert plain == drafted == again
    kept = [engine for _, engine in model.__dict__["_mlxspec_engines"]]
    assert [engine.tile_widths[-1] for engine in kept] == [64]


NO_COSTS = ["[]", "[[]]", "[[1, -1.0]]", "[[1, NaN]]", "[[1, Infinity]]", "[[1e999, 1]]", "7"]
NO_COSTS += ["[[1, 1.0], [1, 2.0]]", "[[8, 1.0], [1, 2.0]]", "[[0, 1.0]]", "[[1]]", "{}", "null"]
NO_CLASSES = ["[[]]", "[[1, 999]]", "[[1, 2], [2, 4]]", "[5]", "[[null]]", "[[1e999]]", "7"]
CIRCUMSTANCES = {"mlx": "1.0", "engine": {"widths": (1, 2, 4)}}


@pytest.mark.parametrize(
    ("remember", "remembered", "found", "key", "damages"),
    [
        (remember_costs, remembered_costs, CHEAP_ROWS, "seconds", NO_COSTS),
        (remember_classes, remembered_classes, [(1, 2), (4,)], "classes", NO_CLASSES),
    ],
)
def test_a_damaged_or_foreign_measurement_is_none(
    remember, remembered, found, key, damages, monkeypatch, tmp_path
):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    assert remembered(CIRCUMSTANCES) is None
    remember(CIRCUMSTANCES, found)
    assert remembered(CIRCUMSTANCES) == found
    [file] = tmp_path.rglob("*.json")
    whole = file.read_text()
    good = json.loads(whole)
    damaged = [json.dumps(good | {key: "HERE"}).replace('"HERE"', text) for text in damages]
    foreign = json.dumps(good | {"mlx": "2.0"})
    for text in (*damaged, foreign, "", "{}", "[]", "null", whole[:-9], "[" * 99999):
        file.write_text(text)
        assert remembered(CIRCUMSTANCES) is None, text
    file.write_bytes(bytes([255, 254]))
    assert remembered(CIRCUMSTANCES) is None
    remember(CIRCUMSTANCES, found)
    assert remembered(CIRCUMSTANCES) == found


def test_where_nothing_can_be_kept_all_is_measured_every_time(monkeypatch, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: blocked)
    for _ in range(2):
        engine = StaticShapeEngine(tiny_model("llama"), max_context_length=100)
        assert engine.tile_costs.widths[0] == 1
        assert engine.remembered == {"width classes": False, "tile costs": False}


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("widths", [None, (16,), (4, 8)])
def test_a_context_shorter_than_a_tile_is_measured_and_drafted_in(family, widths):
    if family == "mamba2" and widths is not None:
        widths = widths[-1:]
    model = tiny_model(family)
    for length in (2, 3, 5, 17, 18):
        options = {"max_context_length": length, "tile_widths": widths, "max_tokens": -1}
        plain = [t for t, _, _ in mlxspec.generate_step([7], model, **options)]
        drafted = mlxspec.generate_step(
            [7], model, draft_model=model, adaptive_draft_count=True, **options
        )
        assert [t for t, _, _ in drafted] == plain
        assert len(plain) == length - 1
        engine = StaticShapeEngine(model, max_context_length=length, tile_widths=widths)
        # A tile is measured if the next narrower one does not hold all of the context.
        narrower = engine.tile_costs.widths[:-1]
        assert all(width < length - 1 for width in narrower)
        assert [found.position for found in engine.measured()] == [0]


@pytest.mark.parametrize("start", [0, 1, 3, 10, 33, 300])
def test_keys_that_become_quantised_within_a_tile_are_measured_and_drafted_with(start):
    model = varied_model("llama", hidden_size=128, head_dim=32)
    options = {
        "kv_bits": 8,
        "kv_group_size": 32,
        "quantized_kv_start": start,
        "max_context_length": 400,
    }
    assert StaticShapeEngine(model, **options).measured()[0].classes
    plain = [t for t, _, _ in mlxspec.generate_step(PROMPT, model, max_tokens=60, **options)]
    drafted = mlxspec.generate_step(
        PROMPT, model, max_tokens=60, prompt_lookup=True, adaptive_draft_count=True, **options
    )
    assert [t for t, _, _ in drafted] == plain
