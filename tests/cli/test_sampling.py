"""Sampling, penalties, stops and quantized keys: the options hold, with drafts and without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.sample_utils import make_logits_processors

from tests.cli.conftest import Run
from tests.cli.story_model import STORY, told

# Hot enough that the story is left now and then, and taken up again, so that drafts fail and hold.
# Filters come before the temperature, where every word but the story's has 7e-9: they are as low.
HOT = ["--temp=3"]
RAW = ["--ignore-chat-template", "--max-tokens=60", "--prompt", f"{STORY}{STORY}Once upon a"]
# A number of drafts, as what pays on a model that computes next to nothing is a matter of luck.
LOOKUP = ["--prompt-lookup", "--prompt-lookup-min-ngram=1", "--num-draft-tokens=7"]


def _accepted(figures: list[str]) -> int:
    found = re.search(r"(\d+) accepted", figures[3])
    assert found
    return int(found[1])


@pytest.mark.parametrize(
    "options",
    [
        ["--seed=1"],
        ["--seed=18446744073709551615", "--top-k=40", "--min-p=1e-10"],
        ["--seed=0", "--xtc-probability=0.1", "--xtc-threshold=1e-9"],
        ["--seed=1", "--repetition-penalty=1.1", "--logit-bias", '{"3": 2.5}'],
    ],
)
def test_the_same_seed_gives_the_same_text_with_drafts_and_without(
    options: list[str], generate: Run
) -> None:
    plain = generate(*RAW, *HOT, *options)
    drafted = generate(*RAW, *HOT, *options, *LOOKUP)
    assert plain.code == drafted.code == 0
    assert plain.err == drafted.err == ""
    assert drafted.text == plain.text != told("Once upon a", len(plain.text))
    assert _accepted(drafted.figures) > 0
    seed = options[0].removeprefix("--seed=")
    assert plain.figures[4] == drafted.figures[4] == f"Seed: {seed}"


def test_another_seed_gives_another_text_and_another_engine_the_same(generate: Run) -> None:
    one, two, dynamic = (
        generate(*RAW, *HOT, *words).text
        for words in (["--seed=1"], ["--seed=2"], ["--seed=1", "--engine=dynamic"])
    )
    assert dynamic == one != two


def test_the_seed_that_was_drawn_is_printed_and_gives_the_text_again(generate: Run) -> None:
    first = generate(*RAW, *HOT)
    found = re.fullmatch(r"Seed: (\d+)", first.figures[4])
    assert found
    again = generate(*RAW, *HOT, *LOOKUP, "--seed", found[1], "--verbose=False")
    assert again == (0, f"{first.text}\n", "")


def test_greedy_decoding_draws_nothing_and_prints_no_seed(generate: Run) -> None:
    assert len(generate("--max-tokens=2").figures) == 4


def test_the_rejection_test_gives_a_text_of_its_own_again_and_again(generate: Run) -> None:
    words = [*RAW, *HOT, *LOOKUP, "--seed=1"]
    coupled = generate(*words)
    rejection, again = (generate(*words, "--acceptance=rejection") for _ in range(2))
    assert rejection.text == again.text != coupled.text
    assert _accepted(rejection.figures) > 0


def test_the_sampling_options_reach_the_generation(
    generate: Run, passed_on: list[tuple], story_model: Path
) -> None:
    words = "--temp 0.5 --top-p 0.9 --min-p 0.01 --min-tokens-to-keep 2 --top-k 5 --seed 7 "
    words += "--xtc-probability 0.5 --xtc-threshold 0.2 --acceptance rejection --prompt-lookup "
    words += r"--kv-bits 4 --kv-group-size 32 --quantized-kv-start 9 --stop end \n\t"
    assert generate("--max-tokens=1", *words.split()).code == 0
    _, tokenizer = mlx_lm.load(str(story_model), lazy=True)
    expected = {
        "temp": 0.5,
        "top_p": 0.9,
        "min_p": 0.01,
        "min_tokens_to_keep": 2,
        "top_k": 5,
        "seed": 7,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "acceptance": "rejection",
        "kv_bits": 4,
        "kv_group_size": 32,
        "quantized_kv_start": 9,
        "stop_strings": ["end", "\n\t"],
        "logits_processors": [],
    }
    _, options = passed_on[0]
    assert {name: options[name] for name in expected} == expected
    # As mlx-lm's command makes them.
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    assert set(options["xtc_special_tokens"]) == set(special)


@pytest.mark.parametrize("drafting", [[], LOOKUP])
@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (["brown"], " time there was one quick ", 6),
        (["ick brown f"], " time there was one qu", 7),
        (["dogs", "jumping", "nowhere"], " time there was one quick brown fox ", 8),
        ([r"\n"], told("Once upon a").partition("\n")[0], None),
        (["😀"], told("Once upon a").partition("😀")[0], None),
        (["nowhere"], told("Once upon a"), 60),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_in_it(
    stops: list[str], text: str, tokens: int | None, drafting: list[str], generate: Run
) -> None:
    outcome = generate(*RAW, *drafting, "--stop", *stops)
    assert outcome.code == 0
    if tokens == 60:
        assert text.startswith(outcome.text)
    else:
        assert outcome.text == text.removeprefix(" ")
    if tokens:
        assert outcome.figures[1].startswith(f"Generation: {tokens} tokens")


PENALTIES = [
    {"repetition_penalty": 30.0, "repetition_context_size": 100},
    {"presence_penalty": 30.0, "presence_context_size": 100},
    {"frequency_penalty": 7.5, "frequency_context_size": 100},
    {"presence_penalty": 30.0},
    {"logit_bias": {"5": 30.0, "40": -2.0}},
    {"logit_bias": {"41": 17.0}, "frequency_penalty": 3.0, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("drafting", [[], LOOKUP])
@pytest.mark.parametrize("penalties", PENALTIES, ids=lambda penalties: "+".join(penalties))
def test_penalties_and_bias_are_mlx_lm_s(
    penalties: dict, drafting: list[str], generate: Run, story_model: Path
) -> None:
    words = []
    for name, value in penalties.items():
        words += [f"--{name.replace('_', '-')}", json.dumps(value)]
    outcome = generate(*RAW, *words, *drafting, "--verbose=False")
    bias = {int(token): value for token, value in penalties.get("logit_bias", {}).items()}
    model, tokenizer = mlx_lm.load(str(story_model))
    processors = make_logits_processors(**(penalties | {"logit_bias": bias}))
    expected = mlx_lm.generate(
        model, tokenizer, RAW[-1], max_tokens=60, logits_processors=processors
    )
    assert outcome == (0, f"{expected}\n", "")


@pytest.mark.parametrize("drafting", [[], LOOKUP])
def test_quantized_keys_keep_the_text(drafting: list[str], generate: Run) -> None:
    outcome = generate(*RAW, *drafting, "--kv-bits=4", "--quantized-kv-start=0")
    assert outcome.text == told("Once upon a", len(outcome.text))
