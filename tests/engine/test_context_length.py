"""The context a model is used with is the one its config declares, whatever it calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlxspec
from mlxspec.engine.support import default_context_length, model_from_config
from tests.cli.story_model import make_story_model
from tests.families.tiny import tiny_configs

FIELDS = [
    "max_position_embeddings",
    "n_ctx",
    "max_context_length",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    "block_size",
]


def _without_context(config: dict) -> dict:
    return {k: v for k, v in config.items() if k not in FIELDS and k != "n_positions"}


@pytest.mark.parametrize("field", FIELDS)
def test_a_declared_context_is_read_from_the_config(field: str) -> None:
    # mlx-lm's gemma2 and mixtral do not keep it; llama keeps one name of it.
    for family in ("gemma2", "mixtral", "llama"):
        config = _without_context(tiny_configs()[family])
        assert default_context_length(model_from_config(config | {field: 777}), 1) == 777
    assert default_context_length(model_from_config(config), 1) == 131_072


def test_the_text_model_s_context_counts() -> None:
    config = tiny_configs()["gemma3"]
    text = _without_context(config["text_config"])
    whole = _without_context(config) | {"text_config": text | {"max_position_embeddings": 555}}
    assert default_context_length(model_from_config(whole), 1) == 555


def test_a_table_of_positions_limits_what_is_declared() -> None:
    config = tiny_configs()["gpt2"]
    model = model_from_config(config | {"n_ctx": 10**6, "max_position_embeddings": 10**6})
    assert default_context_length(model, 16) == config["n_positions"] - 16


def test_a_loaded_model_keeps_it(tmp_path: Path) -> None:
    folder = make_story_model(tmp_path / "story")
    path = folder / "config.json"
    config = _without_context(json.loads(path.read_text()))
    path.write_text(json.dumps(config | {"model_max_length": 321}))
    model, _, read = mlxspec.load(str(folder), lazy=True, return_config=True)
    assert read["model_max_length"] == 321
    assert mlxspec.StaticShapeEngine(model).max_context_length == 321
    assert mlxspec.DynamicShapeEngine(model).max_context_length == 321
