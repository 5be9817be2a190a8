"""What is accepted and does nothing is named in one warning, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

_GREEDY = ["--top-p=0.5", "--min-p=0.1", "--top-k=4", "--xtc-probability=0.5"]
_GREEDY += ["--xtc-threshold=0.2", "--min-tokens-to-keep=2", "--seed=0"]
_CONTEXTS = [f"--{name}-context-size=9" for name in ("repetition", "presence", "frequency")]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            _GREEDY,
            "--top-p, --min-p, --top-k, --xtc-probability, --xtc-threshold, "
            "--min-tokens-to-keep, --seed (decoding is greedy)",
        ),
        (
            ["--temp=1", "--seed=0", "--xtc-threshold=0.2", "--min-tokens-to-keep=2"],
            "--min-tokens-to-keep (without --min-p); --xtc-threshold (without --xtc-probability)",
        ),
        (
            _CONTEXTS,
            "--repetition-context-size (without --repetition-penalty); "
            "--presence-context-size (without --presence-penalty); "
            "--frequency-context-size (without --frequency-penalty)",
        ),
        (
            ["--kv-group-size=32", "--quantized-kv-start=0"],
            "--kv-group-size, --quantized-kv-start (without --kv-bits)",
        ),
        (
            [
                "--ignore-chat-template",
                "--system-prompt=x",
                "--prefill-response=y",
                '--chat-template-config={"suffix": "z"}',
            ],
            "--system-prompt, --prefill-response, --chat-template-config "
            "(with --ignore-chat-template)",
        ),
        (
            ["--use-default-chat-template"],
            "--use-default-chat-template (tokenizers have no default template any more)",
        ),
        (
            ["--seed=1", "--kv-group-size=32"],
            "--seed (decoding is greedy); --kv-group-size (without --kv-bits)",
        ),
        (
            ["--no-exact", "--tile-widths=1,4"],
            "--no-exact (with --tile-widths, which are taken as they are)",
        ),
        (
            ["--prompt-lookup", "--show-drafts"],
            "--show-drafts (stdout is no terminal with colours; FORCE_COLOR=1 colours it anyway)",
        ),
    ],
)
def test_options_without_effect_are_named_in_one_warning(
    options: list[str], named: str, generate: Run
) -> None:
    outcome = generate("--max-tokens=1", *options)
    assert outcome.code == 0
    assert outcome.err == f"mlxspec generate: warning: without effect: {named}\n"


def test_chat_options_are_named_where_the_model_has_no_template(
    bare_model: Path, generate: Run
) -> None:
    outcome = generate("--max-tokens=1", "--system-prompt=x", model=bare_model)
    assert outcome.code == 0
    assert outcome.err == (
        "mlxspec generate: warning: without effect: --system-prompt (the model has no chat "
        "template)\n"
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temp=0", "--top-p=1", "--top-k=0", "--kv-group-size=64", "--verbose=T"],
        ["--prompt-lookup", "--num-draft-tokens=3", "--no-align-proposals"],
        ["--temp=1", "--min-p=0.1", "--min-tokens-to-keep=2", "--top-k=9", "--seed=1"],
        ["--temp=1", "--xtc-probability=0.5", "--xtc-threshold=0.2", "--acceptance=coupled"],
        ["--repetition-penalty=1.1", "--presence-penalty=-1", "--frequency-penalty=1", *_CONTEXTS],
        ["--kv-bits=8", "--kv-group-size=32", "--quantized-kv-start=0"],
        ["--system-prompt=x", "--prefill-response=y", '--chat-template-config={"suffix": "z"}'],
    ],
)
def test_options_that_do_something_or_ask_for_nothing_are_not_named(
    options: list[str], generate: Run
) -> None:
    assert generate("--max-tokens=1", *options).err == ""


def test_a_context_longer_than_the_model_declares_is_warned_of(generate: Run, story_model: Path):
    declared = json.loads((story_model / "config.json").read_text())["max_position_embeddings"]
    for length, warned in ((declared, False), (declared + 1, True)):
        outcome = generate("-m", 2, "--max-context-length", length)
        assert outcome.code == 0
        assert (f"declares {declared} tokens, got {length}" in outcome.err) is warned
