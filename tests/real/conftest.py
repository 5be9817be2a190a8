"""The demo models, loaded once; a visible skip where they are not there and may not be fetched."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

from mlxspec.models import DEMO_MODELS, VARIANTS, cache_dir, is_ready, load


@cache
def _loaded(name: str) -> Any:
    return load(name)


@pytest.fixture
def demo():
    """Load a demo model by name, such as "smollm2:bf16"; gives (model, tokenizer)."""

    def get(name: str) -> Any:
        base, _, variant = name.partition(":")
        assert variant in VARIANTS
        if os.environ.get("MLXSPEC_TEST_DEMO") != "1" and not is_ready(DEMO_MODELS[base], variant):
            pytest.skip(
                f"{name} is not in {cache_dir()}: set MLXSPEC_TEST_DEMO=1 to let the tests fetch it"
            )
        return _loaded(name)

    return get
