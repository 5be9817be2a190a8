"""What cannot be is refused in one line, by name, before a model loads."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import mlx_lm.utils
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlxspec.models
from tests.cli.conftest import Run
from tests.families.tiny import tiny_configs


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that so much as looks for a model."""

    def reached(*args: object, **options: object) -> None:
        pytest.fail("a model was looked for before the options were checked")

    for name in ("resolve", "load"):
        monkeypatch.setattr(mlxspec.models, name, reached)


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that reads weights."""

    def reached(*args: object, **options: object) -> None:
        pytest.fail("weights were read before the model's config was checked")

    monkeypatch.setattr(mlxspec.models, "load", reached)


def _number(flags: str, expected: str, value: str) -> tuple[list[str], str]:
    option = flags.split("/")[0]
    return [f"{option}={value}"], f"argument {flags}: expected {expected}, got '{value}'"


OUT_OF_RANGE = [
    *[
        _number(
            "--max-tokens/-m",
            "a whole number from 1 on, or -1 for no limit but the context",
            value,
        )
        for value in ("0", "-2", "many", "1.5")
    ],
    _number("--temp", "a number from 0 on", "-0.1"),
    _number("--temp", "0 (greedy) or at least 1e-05", "1e-300"),
    _number("--temp", "a number from 0 on", "nan"),
    _number("--temp", "a number from 0 on", "warm"),
    _number("--top-p", "a number from 0 to 1", "1.1"),
    _number("--min-p", "a number from 0 to 1", "-1"),
    _number("--top-k", "a whole number from 0 on", "-1"),
    _number("--xtc-probability", "a number from 0 to 1", "2"),
    _number("--xtc-threshold", "a number from 0 to 0.5", "0.6"),
    _number("--min-tokens-to-keep", "a whole number from 1 on", "0"),
    _number("--seed", f"a whole number from 0 to {2**64 - 1}", "-1"),
    _number("--seed", f"a whole number from 0 to {2**64 - 1}", str(2**64)),
    _number("--max-kv-size", "a whole number from 1 on", "0"),
    _number("--prefill-step-size", "a whole number from 1 on", "0"),
    _number("--kv-bits", "one of 2, 3, 4, 5, 6, 8", "7"),
    _number("--kv-group-size", "one of 32, 64, 128", "48"),
    _number("--quantized-kv-start", "a whole number from 0 on", "-1"),
    _number("--repetition-penalty", "a number from 0 on", "-1"),
    _number("--presence-penalty", "a finite number", "inf"),
    _number("--frequency-penalty", "a finite number", "some"),
    *[
        _number(f"--{name}-context-size", "a whole number from 1 on", "0")
        for name in ("repetition", "presence", "frequency")
    ],
    *[
        _number(
            "--logit-bias",
            'a JSON object of token ids and finite numbers such as {"42": -100}',
            value,
        )
        for value in (
            "",
            "5",
            "[[5, 1]]",
            '{"the": 1}',
            '{"-1": 1}',
            '{"5": "1"}',
            '{"5": true}',
            '{"5": NaN}',
            f'{{"5": 1{"0" * 400}}}',
        )
    ],
    _number("--acceptance", "one of coupled, rejection", "exact"),
    _number("--num-draft-tokens", "a whole number from 0 on", "-1"),
    _number("--draft-p-min", "a number from 0 to 1", "1.5"),
    _number("--prompt-lookup-min-ngram", "a whole number from 1 on", "0"),
    _number("--prompt-lookup-max-ngram", "a whole number from 1 on", "0"),
    _number("--max-context-length", "a whole number from 2 on", "1"),
    *[
        _number("--tile-widths", "widths from 1 on such as 1,2,4,8,16", value)
        for value in ("", "1,,2", "0,8", "-1", "1;2", "wide")
    ],
]
NOT_THERE = [
    (
        ["--max-kv-size", "512"],
        "--max-kv-size 512: a state that forgets its oldest keys cannot be rewound; leave it out, "
        "or bound the memory with --max-context-length",
    ),
    (
        ["--image", "a.png", "b.png"],
        "--image a.png b.png: images are not read yet; leave them out",
    ),
]
COMBINATIONS = [
    *[
        ([*words], f"{words[0]} needs {needed}: give both, or neither")
        for needed, words in (
            ("--prompt-lookup", ("--prompt-lookup-min-ngram", "2")),
            ("--prompt-lookup", ("--prompt-lookup-max-ngram", "9")),
            ("--draft-model", ("--draft-p-min", "0.5")),
        )
    ],
    *[
        ([*words], f"{words[0]} needs --prompt-lookup or --draft-model: give both, or neither")
        for words in (("--acceptance", "rejection", "--temp", "1"),)
    ],
    *[
        (
            [*words],
            f"{words[0]} needs --prompt-lookup or --draft-model or --json-schema or --regex: give "
            "both, or neither",
        )
        for words in (
            ("--num-draft-tokens", "5"),
            ("--num-draft-tokens", "0"),
            ("--no-align-proposals",),
            ("--show-drafts",),
        )
    ],
    *[
        (
            ["--prompt-lookup", *words],
            "--prompt-lookup-min-ngram: expected at most --prompt-lookup-max-ngram, which is "
            f"{most}, got {least}; lower the first or raise the second",
        )
        for words, least, most in (
            (["--prompt-lookup-min-ngram", "5", "--prompt-lookup-max-ngram", "4"], 5, 4),
            (["--prompt-lookup-min-ngram", "9"], 9, 8),
            (["--prompt-lookup-max-ngram", "2"], 3, 2),
        )
    ],
    (
        ["--prompt-lookup", "--acceptance", "rejection"],
        "--acceptance rejection needs --temp above 0: give both, or neither",
    ),
    *[
        (
            ["--prompt-lookup", "--acceptance=rejection", "--temp=1", f"{option}={value}"],
            f"{option}: --acceptance rejection compares distributions before penalties; leave "
            "one of the two out",
        )
        for option, value in (
            ("--repetition-penalty", "1.1"),
            ("--presence-penalty", "-1"),
            ("--frequency-penalty", "0.5"),
            ("--logit-bias", '{"5": 1}'),
        )
    ],
    (
        ["--prompt-lookup", "--engine", "dynamic"],
        "--prompt-lookup: the dynamic engine decodes plainly, without speculation; leave it out, "
        "or give --engine static",
    ),
    (
        ["--draft-model", "small", "--engine", "dynamic"],
        "--draft-model: the dynamic engine decodes plainly, without speculation; leave it out, "
        "or give --engine static",
    ),
    (
        ["--tile-widths", "1,2", "--engine", "dynamic"],
        "--tile-widths: the dynamic engine has no tiles; leave it out, or give --engine static",
    ),
    (
        ["--no-exact", "--engine", "dynamic"],
        "--no-exact: the dynamic engine has no tiles; leave it out, or give --engine static",
    ),
    (
        ["--kv-bits", "8", "--engine", "dynamic"],
        "--kv-bits: the dynamic engine keeps keys and values whole; leave it out, or give "
        "--engine static",
    ),
    (
        ["--quantize-activations"],
        "--quantize-activations: the static engine is not known to be exact with it; leave it "
        "out, or give --engine dynamic",
    ),
    (
        ["--engine", "electric"],
        "argument --engine: expected one of static, dynamic, got 'electric'",
    ),
]
TEXTS = [
    *[
        (
            ["--chat-template-config", value],
            "argument --chat-template-config: expected a JSON object such as "
            f'{{"enable_thinking": false}}, got {value!r}',
        )
        for value in ("{thinking: no}", "[1]", "")
    ],
    (
        ["--chat-template-config", '{"tokenize": true}'],
        "--chat-template-config: 'tokenize' is set by mlxspec itself; leave it out",
    ),
    (
        ["--stop", "end", ""],
        "argument --stop: expected a text that is not empty, got ''",
    ),
    (
        ["--prompt", "caf\udce9"],
        r"argument --prompt/-p: expected text in UTF-8, got 'caf\udce9'",
    ),
    (
        ["--adapter-path", "no/such/folder"],
        "argument --adapter-path: expected a folder with adapters, got 'no/such/folder': there is "
        "no such folder",
    ),
]
UNKNOWN = [
    (["--prompt-lokup"], "unknown option --prompt-lokup (did you mean --prompt-lookup?)"),
    (["--max-tokns=3"], "unknown option --max-tokns=3 (did you mean --max-tokens?)"),
    (["--zzz"], "unknown option --zzz"),
    (["--verb", "False"], "unknown option --verb (did you mean --verbose?)"),
    (["--prompt", "two", "words"], "unexpected word 'words'; quote a text with spaces"),
    (["--prompt"], "argument --prompt/-p: expected one argument"),
]


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("options", "message"), [*OUT_OF_RANGE, *NOT_THERE, *COMBINATIONS, *TEXTS, *UNKNOWN]
)
def test_an_option_is_refused_by_name_before_a_model_is_looked_for(
    options: list[str], message: str, generate: Run
) -> None:
    assert generate(*options) == (2, "", f"mlxspec generate: error: {message}\n")


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize("missing", ["adapter_config.json", "adapters.safetensors"])
def test_a_folder_without_adapters_is_refused(missing: str, tmp_path: Path, generate: Run) -> None:
    for name in {"adapter_config.json", "adapters.safetensors"} - {missing}:
        (tmp_path / name).touch()
    assert generate("--adapter-path", tmp_path).err == (
        "mlxspec generate: error: argument --adapter-path: expected a folder with adapters, got "
        f"{str(tmp_path)!r}: it has no {missing}\n"
    )


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "expected a prompt on stdin, got nothing"),
        (b" \n", "expected a prompt on stdin, got nothing"),
        (b"caf\xe9", "expected text in UTF-8 on stdin, got other bytes"),
    ],
)
def test_a_stdin_without_a_prompt_is_refused(
    stdin: bytes, message: str, generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert generate("--prompt", "-") == (2, "", f"mlxspec generate: error: --prompt -: {message}\n")


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_an_unknown_model_is_refused_with_the_closest_name(engine: str, generate: Run) -> None:
    outcome = generate("--engine", engine, model="smolm2")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("mlxspec generate: error: No model 'smolm2'")
    assert "did you mean 'smollm2'?" in outcome.err


@pytest.mark.usefixtures("_no_weights")
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, generate: Run) -> None:
    outcome = generate(model=tmp_path)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "config.json" in outcome.err


def _folder_with_config(folder: Path, story_model: Path, **entries: object) -> Path:
    """The story model's folder with another config; its weights are never read."""
    for path in story_model.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((story_model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


@pytest.mark.usefixtures("_no_weights")
def test_a_model_that_is_not_static_is_refused_before_its_weights_are_read(
    tmp_path: Path, story_model: Path, generate: Run
) -> None:
    folder = _folder_with_config(tmp_path, story_model, **tiny_configs()["gpt_bigcode"])
    outcome = generate(model=folder)
    assert (outcome.code, outcome.out) == (2, "")
    assert "the static engine cannot run this model: gpt_bigcode" in outcome.err
    assert "--engine dynamic" in outcome.err


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (tiny_configs()["gpt_bigcode"], "cannot run this model: gpt_bigcode"),
        ({"model_file": "own.py"}, "it brings its own code, which a static engine cannot run"),
        ({"hidden_size": "wide"}, "config.json does not describe a model"),
    ],
)
def test_a_draft_model_that_cannot_run_is_refused_before_any_weights_are_read(
    entries: dict, message: str, tmp_path: Path, story_model: Path, generate: Run
) -> None:
    folder = _folder_with_config(tmp_path, story_model, **entries)
    outcome = generate("--draft-model", folder)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "--draft-model: " in outcome.err
    assert message in outcome.err


@pytest.mark.usefixtures("_no_weights")
def test_an_unknown_draft_model_is_refused_before_any_weights_are_read(generate: Run) -> None:
    outcome = generate("--draft-model", "smolm2")
    assert (outcome.code, outcome.out) == (2, "")
    assert "No model 'smolm2'" in outcome.err


def test_a_draft_model_of_another_vocabulary_is_refused_with_the_tokens_named(
    tmp_path: Path, story_model: Path, generate: Run
) -> None:
    folder = _folder_with_config(tmp_path, story_model)
    (folder / "tokenizer.json").unlink()
    text = (story_model / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("|user|", "|human|"))
    outcome = generate("--draft-model", folder)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "'<|user|>' in the target and '<|human|>' in the draft model" in outcome.err


@pytest.mark.usefixtures("_no_weights")
def test_tile_widths_that_the_model_s_layers_do_not_take_are_refused_before_weights(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.engine.support.default_placement", lambda model: "anchored")
    outcome = generate("--tile-widths", "2,3")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(
        "mlxspec generate: error: --tile-widths: this model needs anchored placement: expected"
    )


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        (
            {"model_file": "own.py"},
            [],
            "the static engine cannot run a model that brings its own code; give --engine dynamic "
            "--trust-remote-code if you trust it",
        ),
        (
            {},
            ["--quantize-activations", "--engine", "dynamic"],
            "--quantize-activations: expected a model quantized as nvfp4 or mxfp8, got one not "
            "quantized; leave it out, or give another --model",
        ),
        (
            {"quantization": {"group_size": 32, "bits": 4}},
            ["--quantize-activations", "--engine", "dynamic"],
            "--quantize-activations: expected a model quantized as nvfp4 or mxfp8, got one "
            "quantized as affine; leave it out, or give another --model",
        ),
        (
            {"vocab_size": 500},
            ["--temp", "1", "--top-k", "500"],
            "--top-k: expected less than the 500 tokens of the model's vocabulary, got 500; 0 "
            "samples among all",
        ),
        (
            {"vocab_size": None, "text_config": {"vocab_size": 500}, "model_file": "own.py"},
            ["--temp", "1", "--min-p", "0.1", "--min-tokens-to-keep", "501", "--engine", "dynamic"],
            "--min-tokens-to-keep: expected at most the 500 tokens of the model's vocabulary, got "
            "501",
        ),
        (
            {"vocab_size": 500},
            ["--logit-bias", '{"499": 1, "500": 1}'],
            "--logit-bias: expected ids below the 500 tokens of the model's vocabulary, got 500",
        ),
        (
            tiny_configs()["gemma3_text"],
            ["--kv-bits", "8"],
            "--kv-bits: this model's keys and values cannot be quantized: it has sliding-window "
            "layers, which mlx-lm cannot quantise either; leave it out, or give another --model",
        ),
        (
            tiny_configs()["falcon_h1"],
            ["--kv-bits", "8", "--quantized-kv-start", "1001"],
            "--quantized-kv-start: expected a multiple of 8, the narrowest width of this model's "
            "tiles, got 1001",
        ),
        (
            tiny_configs()["gpt2"],
            ["--max-context-length", "256", "--engine", "dynamic"],
            "--max-context-length: expected at most 255, as the model has a table of positions, "
            "got 256",
        ),
    ],
)
def test_a_config_that_the_options_do_not_go_with_is_refused_before_weights(
    entries: dict,
    options: list[str],
    message: str,
    tmp_path: Path,
    story_model: Path,
    generate: Run,
) -> None:
    folder = _folder_with_config(tmp_path, story_model, **entries)
    outcome = generate(*options, model=folder)
    assert outcome == (2, "", f"mlxspec generate: error: {message}\n")


@pytest.mark.usefixtures("_no_weights")
def test_groups_that_no_head_divides_into_are_refused_before_weights(generate: Run) -> None:
    outcome = generate("--kv-bits", 8, "--kv-group-size", 128)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "--kv-bits: this model's keys and values cannot be quantized" in outcome.err
    assert "divisible by the quantization group size 128" in outcome.err


def test_a_hub_model_that_is_not_static_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, story_model: Path, generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder_with_config(tmp_path, story_model, **tiny_configs()["gpt_bigcode"])

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", download)
    outcome = generate(model="org/name")
    assert (outcome.code, outcome.out) == (2, "")
    assert "the static engine cannot run this model: gpt_bigcode" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--prompt", "Once upon a time", "--max-context-length", 4],
            "--prompt: 4 tokens leave no room for an answer in a context of 4; shorten the "
            "prompt, or raise --max-context-length",
        ),
        (["--prompt", ""], "--prompt: expected at least one token, got an empty prompt"),
    ],
)
@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_a_prompt_that_does_not_fit_is_refused(
    options: list[str], message: str, engine: str, generate: Run, bare_model: Path
) -> None:
    outcome = generate("--engine", engine, *options, model=bare_model)
    assert outcome == (2, "", f"mlxspec generate: error: {message}\n")


def test_an_end_token_that_the_vocabulary_lacks_is_refused(generate: Run) -> None:
    assert generate("--extra-eos-token", "<nothing>") == (
        2,
        "",
        "mlxspec generate: error: --extra-eos-token: expected a token of the model's vocabulary "
        "or its id, got '<nothing>'\n",
    )


def test_a_chat_that_the_template_refuses_is_told_with_its_reason(generate: Run) -> None:
    outcome = generate("--system-prompt", "forbidden")
    assert (outcome.code, outcome.out) == (2, "")
    assert "the model's chat template refuses this chat: no such system" in outcome.err


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("modulo by zero"), "ZeroDivisionError('modulo by zero')"),
        (KeyError("tools"), "KeyError('tools')"),
        (ValueError("roles must alternate"), "roles must alternate"),
    ],
)
def test_a_template_that_breaks_is_told_with_its_reason(
    generate: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(TokenizerWrapper, "apply_chat_template", broken)
    outcome = generate("--prompt", "hello")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"the model's chat template refuses this chat: {reason};" in outcome.err


def test_an_unexpected_error_keeps_its_traceback(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(mlxspec.models, "resolve", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        generate()
