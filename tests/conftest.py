"""Profiles: `fast` for every day, `deep` (MLXSPEC_TEST_PROFILE=deep) before a release."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

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
        patch.setattr("mlxspec.engine.exactness.cache_dir", lambda: folder)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `deep`, visibly, unless the deep profile is asked for."""
    if PROFILE == "deep":
        return
    skip = pytest.mark.skip(reason="deep profile only: set MLXSPEC_TEST_PROFILE=deep")
    for item in items:
        if "deep" in item.keywords:
            item.add_marker(skip)
