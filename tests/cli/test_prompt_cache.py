"""`mlxspec cache-prompt`, and answers that go on from its files."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import mlxspec.models
from mlxspec.cli.main import main
from tests.cli.conftest import Outcome
from tests.cli.story_model import make_story_model

BEGIN, REST = "Once upon a time there", " was one quick"


@pytest.fixture
def cache_prompt(capsys, story_model, tmp_path):
    """Run `mlxspec cache-prompt`; returns the outcome and the file."""

    def run(*options, model=None, prompt=BEGIN, file=None):
        file = file or tmp_path / "cache.safetensors"
        words = ["cache-prompt", "--model", str(model or story_model)]
        words += ["--prompt", prompt, "--prompt-cache-file", str(file), *map(str, options)]
        return Outcome(main(words), *capsys.readouterr()), file

    return run


@pytest.mark.parametrize("options", [(), ("--ignore-chat-template",)])
@pytest.mark.parametrize("drafts", [(), ("--prompt-lookup",)])
def test_an_answer_from_a_file_is_that_to_the_whole_prompt(cache_prompt, generate, options, drafts):
    outcome, file = cache_prompt(*options)
    assert outcome.code == 0
    assert f"Saved to {file}" in outcome.out
    whole = generate("-p", BEGIN + REST, "-m", 60, *options, *drafts)
    rest = generate("--prompt-cache-file", file, "-p", REST, "-m", 60, *options, *drafts)
    assert rest.code == whole.code == 0
    assert rest.text == whole.text
    cached = int(outcome.out.split()[1])
    asked = int(whole.figures[0].split()[1])
    assert f"Turns: {cached} of {asked} prompt tokens reused" in rest.figures
    assert rest.figures[0].startswith(f"Prompt: {asked - cached} tokens beside {cached} reused, ")
    assert cached > 4


def test_the_prompt_may_come_from_stdin_and_keeps_its_backslashes(
    cache_prompt, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO(BEGIN))
    (from_stdin, _), (given, _) = cache_prompt(prompt="-"), cache_prompt()
    assert from_stdin.out.splitlines()[0].split()[1] == given.out.splitlines()[0].split()[1]
    (escaped, _) = cache_prompt(prompt=r"a\nb")
    (replaced, _) = cache_prompt(prompt="a\nb")
    assert escaped.out.split()[1] != replaced.out.split()[1]


def test_model_and_quantisation_are_the_files(cache_prompt, generate, capsys, passed_on):
    _, file = cache_prompt("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 2)
    assert main(["generate", "--prompt-cache-file", str(file), "-p", REST, "-m", "5"]) == 0
    engine = passed_on[-1][1]["engine"]
    assert engine.kv_quantization.bits == 8
    assert engine.quantized_from == 2


def test_an_engine_from_a_file_is_widened_where_drafts_pay_in_wider_tiles(
    cache_prompt, generate, passed_on, wide_tiles_are_cheap
):
    _, file = cache_prompt()
    texts = []
    for options, wide in (
        ((), False),
        (("--prompt-lookup", "--adaptive-draft-count"), True),
        (("--prompt-lookup", "--no-adaptive-draft-count"), False),
    ):
        texts.append(generate("--prompt-cache-file", file, "-p", REST, "-m", 60, *options).text)
        assert (passed_on[-1][1]["engine"].tile_widths[-1] > 16) == wide
    assert len(set(texts)) == 1


def refusal(outcome):
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(outcome.err.splitlines()) == 1
    return outcome.err


@pytest.fixture
def without_loading(monkeypatch):
    """Weights are out of reach: what is refused is refused before they would be read."""

    def load(*arguments, **options):
        raise AssertionError("the model was loaded")

    return lambda: monkeypatch.setattr(mlxspec.models, "load", load)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--kv-bits", 4), "made with kv_bits=None, and the options say 4"),
        (("--engine", "dynamic"), "--prompt-cache-file: the dynamic engine's state"),
    ],
)
def test_options_that_contradict_the_file_are_refused_before_loading(
    cache_prompt, generate, without_loading, options, reason
):
    _, file = cache_prompt()
    without_loading()
    assert reason in refusal(generate("--prompt-cache-file", file, *options))


def test_another_models_config_is_refused_before_loading(
    cache_prompt, generate, without_loading, bare_model, tmp_path
):
    _, file = cache_prompt()
    other = make_story_model(tmp_path / "other")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 2'))
    without_loading()
    message = refusal(generate("--prompt-cache-file", file, model=other))
    assert "it was made with a model with another config; give the --model it was made" in message


def test_other_weights_are_refused(cache_prompt, generate, tmp_path):
    _, file = cache_prompt()
    other = make_story_model(tmp_path / "other")
    weights = mx.load(str(other / "model.safetensors"))
    mx.eval(weights)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.save_safetensors(str(other / "model.safetensors"), weights)
    message = refusal(generate("--prompt-cache-file", file, model=other))
    assert "made with a model with other weights" in message


def test_files_that_are_none_are_refused_before_loading(
    cache_prompt, generate, without_loading, story_model, tmp_path
):
    _, file = cache_prompt()
    model, _ = mlxspec.models.load(str(story_model))
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    save_prompt_cache(str(tmp_path / "theirs.safetensors"), caches, {"model": "x"})
    without_loading()
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-5])
    (tmp_path / "text").write_text("hello")
    for name, reason in (
        ("cut", "only a part of one"),
        ("text", "is no prompt cache"),
        ("theirs.safetensors", "mlx-lm's files do not say which tokens they cover"),
        ("none", "--prompt-cache-file: expected a file, got"),
        ("", "there is a folder"),
    ):
        assert reason in refusal(generate("--prompt-cache-file", tmp_path / name))


def test_a_damaged_file_is_refused(cache_prompt, generate):
    _, file = cache_prompt()
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert "is damaged: its checksum" in refusal(generate("--prompt-cache-file", file))


def test_a_prompt_too_long_after_the_cached_one_is_refused(cache_prompt, generate):
    _, file = cache_prompt()
    message = refusal(generate("--prompt-cache-file", file, "-p", REST, "--max-context-length", 12))
    assert "tokens after the" in message
    assert "leave no room for an answer in a context of 12" in message


def test_a_system_prompt_without_effect_is_named(cache_prompt, generate):
    _, file = cache_prompt()
    outcome = generate("--prompt-cache-file", file, "-p", REST, "--system-prompt", "x", "-m", 3)
    assert (
        "without effect: --system-prompt (with --prompt-cache-file, which holds all" in outcome.err
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--prompt"),
        (["-p", "x"], "--prompt-cache-file"),
        (["-p", "x", "--prompt-cache-file", "no/such/folder/x"], "no/such/folder is not there"),
        (["-p", "x", "--prompt-cache-file", "."], "there is a folder"),
        (["-p", "x", "--prompt-cache-file", "x", "--engine", "dynamic"], "--engine dynamic"),
        (["-p", "x", "--prompt-cache-file", "x", "--max-kv-size", "5"], "--max-kv-size"),
    ],
)
def test_what_cannot_be_cached_is_refused_before_loading(capsys, without_loading, words, reason):
    without_loading()
    code = main(["cache-prompt", *words])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("mlxspec cache-prompt: error:")
    assert reason in captured.err


def test_a_prompt_that_fills_the_context_leaves_the_old_file(cache_prompt):
    _, file = cache_prompt()
    before = file.read_bytes()
    outcome, _ = cache_prompt("--max-context-length", 3)
    assert "leave no room for an answer" in refusal(outcome)
    assert file.read_bytes() == before


def test_the_help_lists_the_command_and_its_options(capsys):
    assert main(["--help"]) == 0
    assert "cache-prompt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["cache-prompt", "--help"])
    out = capsys.readouterr().out
    for option in ("--prompt", "--prompt-cache-file", "--kv-bits", "--system-prompt"):
        assert option in out
