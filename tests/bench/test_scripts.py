"""Every measurement can be asked what it does, and its results say where they come from."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import pytest

from bench.pairs import case_of, plain_pair, write_result
from tests.families.tiny import tiny_model

SCRIPTS = sorted(
    file.stem
    for file in (Path(__file__).parents[2] / "bench").glob("*.py")
    if "argparse.ArgumentParser" in file.read_text()
)
PROVENANCE = {"command", "date", "commit", "machine", "versions"}


def test_there_are_scripts():
    assert {"compare_mlx_lm", "window_cost", "sampling_cost", "gemma_window"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_is_for_before_it_measures(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ending:
        import_module(f"bench.{script}").main()
    assert ending.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m bench.{script}" in out
    # A trial run must not cost the results that are committed.
    assert "--output" in out or script == "compare_plot"


def test_the_texts_that_scripts_read_are_there():
    from bench.gemma_window import TEXT

    assert len(TEXT.read_text(encoding="utf-8")) > 1000


def test_a_pair_is_timed_in_turns_and_its_result_says_where_it_comes_from(tmp_path):
    pair = plain_pair(tiny_model("llama"), mx.array([1, 2, 3]), blocks=3, tokens=2)
    assert pair.same_tokens
    assert pair.ratio.least > 0
    write_result(tmp_path / "pair.json", 3, 2, [case_of(pair, model="llama")])
    result = json.loads((tmp_path / "pair.json").read_text())
    assert result.keys() >= PROVENANCE
    assert result["machine"]["processor"]
    (case,) = result["cases"]
    assert case["mlxspec_ms"]["least"] <= case["mlxspec_ms"]["median"]


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json")), ids=str
)
def test_every_result_that_is_kept_names_its_versions(file):
    assert "versions" in json.loads(file.read_text())
