"""The story model in a folder, and the command run on it inside this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mlxspec.generation
from mlxspec.cli.main import main
from mlxspec.engine import survey
from mlxspec.engine.costs import CANDIDATE_WIDTHS, TileCosts
from tests.cli.story_model import make_story_model


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """What stands between the two rules."""
        return self.out.split("=" * 10 + "\n")[1].removesuffix("\n")

    @property
    def figures(self) -> list[str]:
        """The lines after the second rule."""
        return self.out.split("=" * 10 + "\n")[2].splitlines()


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def story_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the story model."""
    return make_story_model(tmp_path_factory.mktemp("models") / "story")


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story model without a chat template and without a token before a text."""
    return make_story_model(tmp_path_factory.mktemp("models") / "bare", bare=True)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _measurements(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What says that something is measured: silent, or stderr would depend on the tests before."""
    say = survey._say
    monkeypatch.setattr(survey, "_say", lambda *about: None)
    return say


@pytest.fixture
def measurements_are_said(
    _measurements: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing has been measured yet, and what is measured is said."""
    monkeypatch.setattr(survey, "_say", _measurements)
    monkeypatch.setattr("mlxspec.engine.measurements.cache_dir", lambda: tmp_path)


@pytest.fixture
def wide_tiles_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a tile after the first costs a hundredth of it."""
    cheap = TileCosts(tuple((width, 1.0 + 0.01 * width) for width in CANDIDATE_WIDTHS))
    monkeypatch.setattr("mlxspec.engine.survey.remembered_costs", lambda circumstances: cheap)


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What `stream_generate` was called with: the prompt, and the options."""
    calls = []
    stream_generate = mlxspec.generation.stream_generate

    def record(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Any:
        calls.append((prompt, options))
        return stream_generate(model, tokenizer, prompt, **options)

    monkeypatch.setattr(mlxspec.generation, "stream_generate", record)
    return calls


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str], story_model: Path) -> Run:
    """Run `mlxspec generate` with options, on the story model unless another is named."""

    def run(*options: str | Path | int, model: Path | str | None = None) -> Outcome:
        words = ["generate", "--model", str(model or story_model), *map(str, options)]
        code = main(words)
        return Outcome(code, *capsys.readouterr())

    return run
