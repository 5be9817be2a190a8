"""The story model that ends its story with an end token, and what a conversation feeds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlxspec
import mlxspec.conversation.conversation as module
from tests.cli.story_model import make_story_model


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the story model."""
    return make_story_model(tmp_path_factory.mktemp("models") / "story")


@pytest.fixture(scope="session")
def teller(story: Path) -> Any:
    """A model that tells its story once, then emits the end token."""
    model, tokenizer = mlxspec.load(str(story))
    newline, end = tokenizer.encode("\n", add_special_tokens=False), tokenizer.eos_token_id
    assert len(newline) == 1
    weight = model.lm_head.weight
    weight[:, newline[0]] = 0
    weight[end, newline[0]] = 1
    model.lm_head.weight = weight
    mx.eval(model.parameters())
    return model


@pytest.fixture
def tokenizer(story: Path) -> Any:
    """Its tokenizer, which the test may change."""
    return mlxspec.load(str(story), lazy=True)[1]


@pytest.fixture(scope="session")
def engine(teller: Any) -> mlxspec.StaticShapeEngine:
    """An engine of it, which holds what its last user left."""
    return mlxspec.StaticShapeEngine(teller)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that every turn's generation was given."""
    prompts = []
    stream_generate = module.stream_generate

    def record(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Any:
        prompts.append(list(prompt))
        return stream_generate(model, tokenizer, prompt, **options)

    monkeypatch.setattr(module, "stream_generate", record)
    return prompts
