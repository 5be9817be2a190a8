"""`mlxspec generate`: the text, whichever way it is made, and the figures after it."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from mlxspec.cli.main import main
from mlxspec.decoding.options import DEFAULT_NUM_DRAFT_TOKENS
from mlxspec.engine.placement import default_tile_widths
from mlxspec.engine.static import DEFAULT_PREFILL_STEP_SIZE
from mlxspec.errors import ModelNotFound
from tests.cli.conftest import Run
from tests.cli.story_model import STORY, WORDS, told

RAW = "--ignore-chat-template"
ALONE = "--verbose=False"


def _prompt_tokens(figures: list[str]) -> int:
    found = re.fullmatch(r"Prompt: (\d+) tokens, [\d.]+ tokens-per-sec", figures[0])
    assert found
    return int(found[1])


def test_the_text_stands_between_mlx_lm_s_rules_and_its_figures_follow(generate: Run) -> None:
    outcome = generate("--max-tokens", 5)
    assert outcome.code == 0
    assert outcome.out.startswith("=" * 10 + "\n")
    assert outcome.text == "Once upon a time there"
    _, generation, memory, speculation = outcome.figures
    assert re.fullmatch(r"Generation: 5 tokens, [\d.]+ tokens-per-sec", generation)
    assert re.fullmatch(r"Peak memory: [\d.]+ GB", memory)
    assert speculation == "Speculation: off (no drafter was given); 5 forwards"


@pytest.mark.parametrize("no", ["False", "F", "false", "f"])
def test_without_verbose_the_text_comes_alone(no: str, generate: Run) -> None:
    assert generate("--max-tokens", 5, "--verbose", no) == (0, "Once upon a time there\n", "")


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("sampling", [[], ["--temp", "1", "--seed", "3"]])
def test_a_draft_model_drafts_and_the_text_is_the_same(
    lookup: bool, sampling: list[str], generate: Run, story_model: Path
) -> None:
    common = ["--max-tokens", 40, "--temp", 0, *sampling]
    drafting = ["--draft-model", story_model, *(["--prompt-lookup"] if lookup else [])]
    drafted = generate(*common, *drafting)
    assert drafted.code == 0
    assert drafted.text == generate(*common).text
    found = re.search(r"(\d+) drafted, (\d+) accepted", drafted.figures[3])
    assert found
    assert int(found[1]) >= int(found[2]) >= 30


def test_without_options_the_prompt_is_hello_and_a_hundred_tokens_come(
    generate: Run, story_model: Path
) -> None:
    outcome = generate()
    _, tokenizer = mlx_lm.load(str(story_model), lazy=True)
    hello = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    assert _prompt_tokens(outcome.figures) == len(hello)
    assert outcome.figures[1].startswith("Generation: 100 tokens")


def test_the_text_is_mlx_lm_s(generate: Run, story_model: Path) -> None:
    model, tokenizer = mlx_lm.load(str(story_model))
    expected = mlx_lm.generate(model, tokenizer, "one quick", max_tokens=70)
    assert generate(RAW, "-p", "one quick", "-m", 70, ALONE).out == expected + "\n"
    assert expected == told("one quick", len(expected))


# A number of drafts, as what pays on a model that computes next to nothing is a matter of luck.
SEVEN = ("--num-draft-tokens", "7")
MISLEADING = f"{STORY}Once upon a dog there was nobody at all.\nOnce upon a"


@pytest.mark.parametrize(
    "drafting",
    [
        ["--no-adaptive-draft-count"],
        ["--num-draft-tokens", "1"],
        ["--num-draft-tokens", "30", "--no-align-proposals"],
        [*SEVEN, "--prompt-lookup-min-ngram", "1", "--prompt-lookup-max-ngram", "2"],
        [*SEVEN, "--tile-widths", "2,4"],
        [*SEVEN, "--prefill-step-size", "8"],
    ],
)
def test_speculation_changes_no_character_and_says_what_it_did(
    drafting: list[str], generate: Run
) -> None:
    common = [RAW, "--prompt", MISLEADING, "--max-tokens", "70"]
    plain = generate(*common)
    speculative = generate(*common, "--prompt-lookup", *drafting)
    assert speculative.text == plain.text == told("Once upon a", len(plain.text))
    counts = re.fullmatch(
        r"Speculation: (\d+) rounds, (\d+) forwards, (\d+) drafted, (\d+) accepted "
        r"\(\d+%\), (\d+) forwards saved \([\d.]+ tokens per forward\).*",
        speculative.figures[3],
    )
    assert counts
    _, forwards, drafted, accepted, saved = map(int, counts.groups())
    assert 0 < accepted < drafted
    assert saved == 70 - forwards > 0


def test_a_draft_of_no_tokens_is_said_to_be_off(generate: Run) -> None:
    outcome = generate("--prompt-lookup", "--num-draft-tokens", 0, "--max-tokens", 3)
    assert outcome.figures[3] == "Speculation: off (num_draft_tokens is 0); 3 forwards"


def test_the_dynamic_engine_gives_the_same_text_and_says_why_it_is_plain(generate: Run) -> None:
    static, dynamic = (generate("--engine", e, "-m", 70) for e in ("static", "dynamic"))
    assert dynamic.text == static.text
    assert dynamic.figures[3] == (
        "Speculation: off (the dynamic engine decodes plainly: it was asked for); 70 forwards"
    )


def test_a_model_that_is_not_static_runs_under_the_dynamic_engine(
    generate: Run, story_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.engine.support.STATIC_FAMILIES", frozenset())
    refused = generate()
    assert refused.code == 2
    assert "--engine dynamic" in refused.err
    outcome = generate("--engine", "dynamic", "-m", 5)
    assert outcome.text == "Once upon a time there"
    assert "llama has not been checked" in outcome.figures[3]


def test_dash_reads_the_prompt_from_stdin_as_it_is(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(r"Once\nupon a time"))
    piped = generate(RAW, "--prompt", "-", "-m", 2)
    assert piped.text == "there was"
    typed = generate(RAW, "--prompt", r"Once\nupon a time", "-m", 2)
    assert _prompt_tokens(piped.figures) > _prompt_tokens(typed.figures)


def test_escapes_in_a_typed_prompt_are_line_ends_and_tabs(generate: Run) -> None:
    typed = generate(RAW, "--prompt", r"all\n\tone", "-m", 1)
    literal = generate(RAW, "--prompt", "all\n\tone", "-m", 1)
    assert _prompt_tokens(typed.figures) == _prompt_tokens(literal.figures)


def test_the_chat_template_is_used_unless_it_is_ignored(generate: Run, bare_model: Path) -> None:
    words = ["--prompt", "one quick", "-m", 2]
    assert generate(*words).text == "Once upon"
    assert generate(*words, RAW).text == "brown fox"
    assert generate(*words, model=bare_model).text == "brown fox"


@pytest.mark.parametrize(
    ("options", "messages", "variables"),
    [
        ([], [("user", "hello")], {}),
        (["--system-prompt", "be quick"], [("system", "be quick"), ("user", "hello")], {}),
        (["--chat-template-config", '{"suffix": "over"}'], [("user", "hello")], {"suffix": "over"}),
    ],
)
def test_the_model_reads_the_chat_that_mlx_lm_would_give_it(
    options: list[str],
    messages: list[tuple[str, str]],
    variables: dict[str, str],
    generate: Run,
    story_model: Path,
    passed_on: list[tuple],
) -> None:
    _, tokenizer = mlx_lm.load(str(story_model), lazy=True)
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=True,
        **variables,
    )
    assert generate(*options, "-m", 1).code == 0
    assert passed_on[0][0] == expected


def test_a_raw_prompt_has_the_tokens_that_mlx_lm_puts_before_a_text(
    generate: Run, story_model: Path, passed_on: list[tuple]
) -> None:
    _, tokenizer = mlx_lm.load(str(story_model), lazy=True)
    assert generate(RAW, "-p", "one quick", "-m", 1).code == 0
    assert passed_on[0][0] == tokenizer.encode("one quick", add_special_tokens=True)
    assert tokenizer.decode(passed_on[0][0]) == "<|begin|>one quick"


def test_the_options_reach_the_generation(generate: Run, passed_on: list[tuple]) -> None:
    words = "--prompt-lookup --prompt-lookup-min-ngram 2 --prompt-lookup-max-ngram 4 "
    words += "--num-draft-tokens 5 --no-align-proposals --tile-widths 1,4 --max-context-length 200 "
    assert generate(*words.split(), "--prefill-step-size", 64, "--max-tokens", 3).code == 0
    _, options = passed_on[0]
    drafter = options.pop("drafter")
    assert (drafter.min_ngram, drafter.max_ngram) == (2, 4)
    assert options == {
        "num_draft_tokens": 5,
        "adaptive_draft_count": None,
        "align_proposals": False,
        "tile_widths": (1, 4),
        "exact": None,
        "max_context_length": 200,
        "prefill_step_size": 64,
        "max_tokens": 3,
        "stop_strings": (),
        "logits_processors": [],
        "engine": "static",
        "prompt_progress_callback": None,
    }


def test_no_exact_takes_every_width(generate: Run, passed_on: list[tuple]) -> None:
    assert generate("--no-exact", "--max-tokens", 3).code == 0
    assert passed_on[0][1]["exact"] is False


def test_the_options_reach_the_loader(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story_model: Path
) -> None:
    for name in ("adapter_config.json", "adapters.safetensors"):
        (tmp_path / name).touch()
    calls = []

    def record(path: Path, **options: Any) -> None:
        calls.append((path, options))
        raise ModelNotFound("far enough")

    monkeypatch.setattr("mlxspec.models.load", record)
    assert generate("--trust-remote-code", "--adapter-path", tmp_path).code == 2
    assert calls == [
        (
            story_model,
            {
                "adapter_path": str(tmp_path),
                "tokenizer_config": {"trust_remote_code": True},
                "model_config": {"quantize_activations": False},
                "lazy": True,
                "trust_remote_code": True,
            },
        )
    ]


def test_a_prefilled_answer_is_gone_on_from(generate: Run) -> None:
    assert generate("--prefill-response", "Once upon a", "-m", 2).text == "time there"


def test_an_extra_end_token_ends_the_text_and_is_not_in_it(
    generate: Run, story_model: Path
) -> None:
    vocabulary = json.loads((story_model / "tokenizer.json").read_text())["model"]["vocab"]
    for token in ("Ġthere", vocabulary["Ġthere"]):
        outcome = generate("--extra-eos-token", "<|user|>", token)
        assert outcome.text == "Once upon a time"
        assert outcome.figures[1].startswith("Generation: 5 tokens")


def test_no_limit_goes_on_until_the_context_is_full(generate: Run) -> None:
    outcome = generate(RAW, "-p", WORDS, "-m", -1, "--max-context-length", 50, "--prompt-lookup")
    prompt_tokens = _prompt_tokens(outcome.figures)
    assert outcome.figures[1].startswith(f"Generation: {50 - prompt_tokens} tokens")


def test_help_tells_the_defaults_that_hold(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["generate", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--no-adaptive-draft-count", DEFAULT_NUM_DRAFT_TOKENS),
        ("--tile-widths W,W,...", ",".join(map(str, default_tile_widths("free")))),
        ("--prefill-step-size N", DEFAULT_PREFILL_STEP_SIZE),
        ("--model MODEL", "smollm2"),
    ):
        assert re.search(rf"{re.escape(option)} [^()]*\(default: {default}[,)]", text), option


@pytest.mark.usefixtures("adaptive_by_default", "measurements_are_said")
def test_what_is_measured_once_is_said_before_it_takes_time(generate: Run) -> None:
    first, again = (generate("-m", 3, "--prompt-lookup") for _ in range(2))
    # Then the widths are compared that pay, if others than those before do.
    assert first.err.splitlines()[:2] == [
        f"mlxspec generate: {what} rows, once for this model and machine ..."
        for what in ("comparing forwards of up to 16", "timing forwards of up to 64")
    ]
    assert (first.text, again.err) == (again.text, "")
