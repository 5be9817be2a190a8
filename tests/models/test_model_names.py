"""A model's name leads to a checked folder, or to a sentence before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from huggingface_hub import errors as hub_errors

from mlxspec.errors import ModelNotFound, UnsupportedModel
from mlxspec.models import DEMO_MODELS, demo_names, load, load_config, resolve
from mlxspec.models.convert import convert
from mlxspec.models.registry import choose_form, parse_demo_name


@pytest.fixture(scope="module")
def good(gguf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    convert(gguf, folder, choose_form("f32", on_metal=False))
    return folder


@pytest.fixture
def folder(good, tmp_path, monkeypatch) -> Path:
    """A good model folder to be spoilt; reading a weight or using the network fails the test."""
    monkeypatch.setattr(mx, "load", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(
        mlx_lm.utils, "snapshot_download", lambda *_, **__: pytest.fail("the network was used")
    )
    return Path(shutil.copytree(good, tmp_path / "model"))


def set_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(kind, *args, **options) -> str:
    with pytest.raises(kind) as caught:
        load(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["foo", "", "/no/such/folder", "./foo", "a/b/c", "~/no-such-one"])
def test_an_unknown_name_is_refused_at_once_with_the_names_there_are(folder, name):
    message = refusal(ModelNotFound, name)
    assert repr(name) in message
    for known in demo_names():
        assert known in message


def test_a_misspelt_name_gets_the_nearest_one(folder):
    assert "did you mean 'smollm2'" in refusal(ModelNotFound, "smolm2")
    assert "did you mean 'bf16'" in refusal(ModelNotFound, "smollm2:bf6")


def test_an_unknown_variant_lists_the_variants(folder):
    message = refusal(ModelNotFound, "smollm2:")
    assert "smollm2:4bit, smollm2:bf16, smollm2:f32" in message


def test_a_path_object_is_never_a_name_of_another_kind(folder):
    for path in (Path("smollm2-not-here"), Path("org/name")):
        refusal(ModelNotFound, path)


def test_the_default_variant_suits_the_backend():
    assert choose_form(None, on_metal=True) == choose_form("4bit", on_metal=True)
    assert choose_form(None, on_metal=False) == choose_form("bf16", on_metal=False)
    assert choose_form("4bit", on_metal=True).dtype == "bfloat16"
    assert choose_form("4bit", on_metal=False).dtype == "float32"
    labels = {choose_form(v, on_metal=m).label for v in ("4bit", "bf16", "f32") for m in (0, 1)}
    assert labels == {"4bit", "4bit-f32", "bf16", "f32"}


def test_every_listed_name_is_understood():
    for name in demo_names():
        model, variant = parse_demo_name(name)
        assert name in (model.name, f"{model.name}:{variant}")


def test_a_file_is_not_a_model(folder):
    assert "is a file" in refusal(ModelNotFound, folder / "model.safetensors")


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(ModelNotFound, folder)


@pytest.mark.parametrize("text", ["{", "[1]", "3", "", "\x00"])
@pytest.mark.parametrize("generation_config", [False, True])
def test_a_config_that_is_no_json_object(folder, text, generation_config):
    (folder / "config.json").write_text(text)
    if generation_config:
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert "is not a JSON object" in refusal(ModelNotFound, folder)


def test_a_config_without_model_type(folder):
    set_config(folder, model_type=None)
    assert "does not say its model_type" in refusal(UnsupportedModel, folder)


def test_a_model_type_mlx_lm_does_not_know(folder):
    set_config(folder, model_type="lama")
    message = refusal(UnsupportedModel, folder)
    assert "'lama'" in message
    assert "did you mean 'llama'" in message


def test_a_helper_module_of_mlx_lm_is_no_model_type(folder):
    set_config(folder, model_type="rope_utils")
    assert "no model of type 'rope_utils'" in refusal(UnsupportedModel, folder)


def test_a_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    message = refusal(ModelNotFound, folder)
    assert "no tokenizer" in message
    assert "tokenizer.json" in message


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "no model*.safetensors" in refusal(ModelNotFound, folder)
    (folder / "pytorch_model.bin").touch()
    assert "mlx_lm.convert" in refusal(ModelNotFound, folder)


def test_weight_files_that_the_index_names_and_are_not_there(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(ModelNotFound, folder)
    assert "1 of its 2 weight files: model-00002-of-00002.safetensors" in message
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "not an index" in refusal(ModelNotFound, folder)


def test_adapters_that_are_not_there(folder):
    assert "adapter_config.json" in refusal(ModelNotFound, folder, adapter_path=folder / "no")


def test_code_of_the_models_own_needs_trust(folder):
    set_config(folder, model_file="model.py", model_type="anything")
    assert "trust_remote_code=True" in refusal(UnsupportedModel, folder)
    assert resolve(folder) == folder


def test_a_revision_of_something_without_revisions_is_refused(folder):
    for name in (folder, "smollm2"):
        with pytest.raises(ValueError, match="revision"):
            load(name, revision="main")


# The hub.


def test_a_hub_model_that_cannot_run_costs_no_download_of_weights(folder, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, [p for p in allow_patterns if "safetensors" in p]))
        return str(folder)

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", download)
    assert resolve("org/name", "v2") == folder
    assert asked == [("org/name", "v2", []), ("org/name", "v2", ["model*.safetensors"])]
    asked.clear()
    set_config(folder, model_type="unheard_of")
    with pytest.raises(UnsupportedModel):
        resolve("org/name")
    assert asked == [("org/name", None, [])]


def test_a_hub_model_that_the_caller_does_not_want_costs_no_download_of_weights(
    folder, monkeypatch
):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(folder)

    def check(config):
        raise UnsupportedModel(f"not a {config['model_type']}")

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", download)
    with pytest.raises(UnsupportedModel, match="not a llama"):
        resolve("org/name", check=check)
    assert len(asked) == 1
    assert not any("safetensors" in pattern for pattern in asked[0])


@pytest.mark.parametrize(
    ("error", "fragment"),
    [
        (hub_errors.LocalEntryNotFoundError("ConnectError: no route.\nmore"), "Check the network"),
        (hub_errors.OfflineModeIsEnabled("offline"), "Check the network"),
        (ConnectionError(), "ConnectionError"),
        (hub_errors.RepositoryNotFoundError, "none that the hub shows you"),
        (hub_errors.RevisionNotFoundError, "at revision 'v9'"),
        (hub_errors.GatedRepoError, "log in"),
    ],
)
def test_a_hub_model_that_cannot_be_had(folder, monkeypatch, error, fragment):
    if isinstance(error, type):
        error = error.__new__(error)  # their constructors want an HTTP response

    def download(*_args, **_options):
        raise error

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", download)
    assert fragment in refusal(ModelNotFound, "org/name", revision="v9")


# What loads.


def test_loads_as_mlx_lm_does(good):
    model, tokenizer, config = load(good, return_config=True)
    reference, _, reference_config = mlx_lm.utils.load(str(good), return_config=True)
    assert config == reference_config == load_config(good)
    ids = mx.array([tokenizer.encode("ab 12")])
    assert mx.array_equal(model(ids), reference(ids))
    assert len(load(str(good))) == 2


def test_model_config_replaces_what_the_folder_says(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    set_config(folder, model_type="unheard_of")
    _, _, config = load(
        folder, model_config={"model_type": "llama", "rope_theta": 5.0}, return_config=True
    )
    assert (config["model_type"], config["rope_theta"]) == ("llama", 5.0)


@pytest.mark.parametrize(
    ("config", "generation_config", "ends"),
    [
        ({}, None, {2}),
        ({"eos_token_id": 5}, None, {2, 5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {2, 5, 6, 7}),
        ({"eos_token_id": 5}, {"eos_token_id": [0, 7]}, {2, 5, 0, 7}),
        ({"text_config": {"eos_token_id": [8]}}, {"eos_token_id": 7}, {2, 7, 8}),
        ({"eos_token_id": 5, "text_config": {}}, {"eos_token_id": None}, {2, 5}),
        ({"eos_token_id": 5}, "{ spoilt", {2, 5}),
    ],
)
def test_the_end_tokens_are_those_of_the_tokenizer_and_of_both_configs(
    good, tmp_path, config, generation_config, ends
):
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    set_config(folder, **{"eos_token_id": None, **config})
    if generation_config is not None:
        spoilt = isinstance(generation_config, str)
        text = generation_config if spoilt else json.dumps(generation_config)
        (folder / "generation_config.json").write_text(text)
    _, tokenizer = load(folder, lazy=True)
    assert tokenizer.eos_token_ids == ends


def test_a_model_config_says_which_end_tokens_the_config_names(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    set_config(folder, eos_token_id=5)
    _, tokenizer = load(folder, model_config={"eos_token_id": [6]}, lazy=True)
    assert tokenizer.eos_token_ids == {2, 6}


def test_a_demo_name_loads_its_variant(tiny, wheel_dir, monkeypatch):
    monkeypatch.setitem(DEMO_MODELS, "tiny", tiny)
    model, tokenizer = load("tiny")
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.bfloat16
    seen = []
    assert resolve("tiny:bf16") == resolve("tiny", check=seen.append)
    assert [config["model_type"] for config in seen] == ["llama"]
    model, _ = load("tiny:4bit")
    assert model.layers[0].self_attn.q_proj.bits == 4
    assert model.model.embed_tokens.bits == 8
    assert tokenizer.eos_token_ids == {2}


def test_a_folder_with_a_demo_models_name_is_reached_by_a_path(good, tmp_path, monkeypatch):
    shutil.copytree(good, tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert resolve("./smollm2") == resolve(Path("smollm2")) == Path("smollm2")
