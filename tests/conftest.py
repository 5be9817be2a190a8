"""Profiles: `fast` for every day, `deep` (MLXSPEC_TEST_PROFILE=deep) before a release."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from mlxspec.decoding.options import SpeculativeDecodingOptions

_ADAPTS = SpeculativeDecodingOptions.adapts
PROFILE = os.environ.get("MLXSPEC_TEST_PROFILE", "fast")

# No deadline: the first call of a graph compiles it, which takes seconds on CPU.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=300, **_COMMON)
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True, scope="session")
def _measurements_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines measure and remember in tests does not reach the user's cache."""
    folder = tmp_path_factory.mktemp("widths")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxspec.engine.measurements.cache_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _as_many_drafts_as_always() -> Iterator[None]:
    """Where a test does not say how many tokens to draft, it is 7, and not what pays.

    The tiny models compute next to nothing, so what pays with them is a matter of luck. The tests
    of the adaptive count ask for it, or for `adaptive_by_default`.
    """
    with pytest.MonkeyPatch.context() as patch:
        asked = property(lambda self: self.adaptive is True and self.num_draft_tokens != 0)
        patch.setattr(SpeculativeDecodingOptions, "adapts", asked)
        yield


@pytest.fixture
def adaptive_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as much as pays where nothing else is said, as users do."""
    monkeypatch.setattr(SpeculativeDecodingOptions, "adapts", _ADAPTS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `deep`, visibly, unless the deep profile is asked for."""
    if PROFILE == "deep":
        return
    skip = pytest.mark.skip(reason="deep profile only: set MLXSPEC_TEST_PROFILE=deep")
    for item in items:
        if "deep" in item.keywords:
            item.add_marker(skip)
