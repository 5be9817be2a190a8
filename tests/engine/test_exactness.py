"""Which widths compute the same bits is measured, remembered, and decides the ladder."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxspec import StaticShapeEngine
from mlxspec.engine.exactness import best_class, width_classes
from mlxspec.engine.measurements import measured_in, remember, remembered
from tests.families.tiny import tiny_model


def test_a_width_whose_own_rows_differ_is_not_decoded_in(monkeypatch, tmp_path):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    right = StaticShapeEngine.verify

    def late_rows_differ(self, block, *arguments):
        rows = right(self, block, *arguments)
        if rows.logits is None:
            return rows
        late = (mx.arange(len(block)) >= 4)[:, None] * mx.array(1e-6)
        return replace(rows, logits=rows.logits * (1 + late))

    monkeypatch.setattr(StaticShapeEngine, "verify", late_rows_differ)
    engine = StaticShapeEngine(tiny_model("llama", seed=9), max_context_length=64, span_step=32)
    assert engine.tile_widths == (1, 2, 4)
    assert "tile widths 1, 2, 4 of 1, 2, 4, 8, 16" in engine.note


def test_measurements_are_kept_apart_by_all_that_chooses_kernels():
    kept = [
        measured_in(model, **engine)
        for model in (tiny_model("llama"), tiny_model("qwen2"))
        for engine in ({"span_step": 16}, {"span_step": 256})
    ]
    assert len({json.dumps(circumstances) for circumstances in kept}) == 4
    wide, narrow = (tiny_model("llama") for _ in range(2))
    wide.args.num_attention_heads = 8
    assert measured_in(wide) != measured_in(narrow)


STALE = {
    "another mlx": ("mlxspec.engine.measurements.version", lambda package: f"{package} 0"),
    "another measurement": ("mlxspec.engine.measurements._MEASUREMENT", -1),
    "another device": ("mlx.core.default_device", lambda: "Device(tpu, 0)"),
    "another chip": ("mlx.core.device_info", lambda: {"device_name": "M9"}),
    "another system": ("platform.release", lambda: "99.0"),
    "another machine": ("platform.machine", lambda: "riscv"),
}


@pytest.mark.parametrize("what", [*STALE, "another library"])
def test_what_was_measured_in_other_circumstances_is_measured_again(monkeypatch, tmp_path, what):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    model = tiny_model("llama")
    remember(measured_in(model), {"answer": 1})
    assert remembered(measured_in(model), lambda stored: stored["answer"]) == 1
    if what in STALE:
        monkeypatch.setattr(*STALE[what])
    else:
        monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert remembered(measured_in(model), lambda stored: stored["answer"]) is None


def test_no_width_is_used_that_was_not_measured():
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=12)
    assert engine.tile_widths == (1, 2, 4, 8)
    assert engine.width_classes == [(1, 2, 4, 8)]


def test_what_a_short_context_could_not_compare_is_not_believed_in_a_long_one(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)
    model = tiny_model("llama")
    for context_length in (20, 64, 128):
        engine = StaticShapeEngine(model, max_context_length=context_length)
        assert engine.tile_widths == (1, 2, 4, 8, 16)
        assert engine.remembered["width classes"] == (context_length == 128)


def test_aligned_engines_say_what_a_token_costs():
    assert "8 rows a token" in StaticShapeEngine(tiny_model("mamba2")).note


def test_widths_are_grouped_by_their_bits_and_the_largest_group_is_taken(monkeypatch):
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=64)
    assert width_classes(engine, engine.tile_widths) == [(1, 2, 4, 8, 16)]
    assert engine.processed_token_count == 0
    right = StaticShapeEngine.verify

    def other_bits(self, block, *arguments):
        rows = right(self, block, *arguments)
        step = 1e-6 * (len(block) > 2)
        return replace(rows, logits=rows.logits * (1 + mx.array(step)))

    monkeypatch.setattr(StaticShapeEngine, "verify", other_bits)
    classes = width_classes(engine, engine.tile_widths)
    assert classes == [(1, 2), (4, 8, 16)]
    assert best_class(classes) == (4, 8, 16)
    assert best_class([(1, 2), (8, 16)]) == (8, 16)
