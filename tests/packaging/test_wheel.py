"""What is installed is whole: the wheel holds the kernels, and runs away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import mlxspec
from tests.cli.story_model import make_story_model

CHECKOUT = Path(__file__).parents[2]


class Installed(NamedTuple):
    """A fresh environment with the wheel, used from a folder that holds nothing of it."""

    scripts: Path
    folder: Path

    def run(self, command: str, *words: str) -> str:
        """The stdout of a command of the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return _output([str(self.scripts / command), *words], self.folder, environment)


def _output(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    _output([*build, str(CHECKOUT)], folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment that finds the other packages where they are installed now.

    No network is needed so. The environment's own packages come first on its path.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _output([*pip, "install", "--no-deps", "--no-index", str(wheel)], home)
    (site_packages,) = home.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "others.pth").write_text("\n".join(others))
    return Installed(home / "bin", tmp_path_factory.mktemp("elsewhere"))


def test_the_wheel_holds_kernels_types_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {path.name for path in (CHECKOUT / "kernels").iterdir()}
    assert any(name.endswith(".metal") for name in kernels)
    assert {f"mlxspec/kernels/{name}" for name in kernels} <= set(names)
    texts = {path.name for path in (CHECKOUT / "mlxspec/benchmark/texts").iterdir()}
    assert len(texts) == 5
    assert {f"mlxspec/benchmark/texts/{name}" for name in texts} <= set(names)
    assert "mlxspec/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "mlxspec",
        f"mlxspec-{mlxspec.__version__}.dist-info",
    }


def test_the_installed_package_is_the_one_that_runs(installed: Installed) -> None:
    script = "import mlxspec, pathlib; print(pathlib.Path(mlxspec.__file__).parent)"
    package = Path(installed.run("python", "-c", script).strip())
    assert installed.scripts.parent in package.parents
    assert list((package / "kernels").glob("*.metal"))


def test_the_entry_points_run_from_any_folder(installed: Installed) -> None:
    assert installed.run("mlxspec", "--version") == f"{mlxspec.__version__}\n"
    model = make_story_model(installed.folder / "story")
    options = ["--model", model.name, "--prompt-lookup", "--verbose=False", "--max-tokens=40"]
    text = installed.run("mlxspec", "generate", *options)
    assert text.startswith("Once upon a time there was one quick brown fox")
    assert installed.run("mlxspec.generate", *options) == text
