"""The benchmark is fair: the same tokens, counted right, and nothing traced on the clock."""

from __future__ import annotations

import pytest

from mlxspec import PromptLookup, StaticShapeEngine
from mlxspec.benchmark import (
    NAMES,
    Contender,
    MlxLmPlain,
    MlxLmSpeculative,
    Mlxspec,
    load_workload,
    markdown_table,
)
from mlxspec.benchmark.comparison import first_difference
from tests.families.tiny import tiny_model

# Its answer to this prompt crosses the first span's end at 256.
PROMPT = [1 + i % 9 for i in range(250)]
LIMIT = 24


class PlainTemplate:
    """A chat template that shows what it was asked for."""

    def apply_chat_template(
        self, messages, tokenize, add_generation_prompt, continue_final_message
    ):
        return [len(messages), add_generation_prompt, continue_final_message]

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return text


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_ends_where_the_model_goes_on(name):
    workload = load_workload(name)
    roles = [message["role"] for message in workload.messages]
    assert roles == ["user", "assistant", "user"][: len(roles)]
    begun = roles[-1] == "assistant"
    assert workload.prompt(PlainTemplate()) == [len(roles), not begun, begun]


def contenders(model) -> list[Contender]:
    engine = StaticShapeEngine(model, tile_widths=(1, 2, 4, 8))
    return [
        MlxLmPlain(model),
        MlxLmSpeculative(model, model, "itself", 3),
        Mlxspec("plain", model, engine),
        Mlxspec("lookup", model, engine, lambda: PromptLookup(min_ngram=1), 7),
    ]


def test_contenders_generate_the_same_and_trace_nothing_on_the_clock():
    model = tiny_model("llama")
    expected = None
    for contender in contenders(model):
        contender.warm_up(PROMPT, LIMIT)
        run = contender.run(PROMPT, LIMIT, ())
        expected = expected or run.tokens
        assert run.tokens == expected
        assert len(run.tokens) == LIMIT
        assert not run.traced
        assert run.seconds > 0
        assert LIMIT / 8 <= run.forwards <= LIMIT


def test_forwards_are_those_of_the_target():
    model = tiny_model("llama")
    plain, speculative, *_ = contenders(model)
    assert plain.run(PROMPT, LIMIT, ()).forwards == LIMIT
    # It drafts for itself, so three of every four tokens are drafts.
    assert speculative.run(PROMPT, LIMIT, ()).forwards == LIMIT / 4


def test_a_stop_token_ends_a_run_and_is_counted():
    model = tiny_model("llama")
    tokens = MlxLmPlain(model).run(PROMPT, LIMIT, ()).tokens
    stop = tokens[5]
    for contender in contenders(model):
        assert contender.run(PROMPT, LIMIT, {stop}).tokens == tokens[: tokens.index(stop) + 1]


def test_the_first_difference_is_told_with_the_margin_of_the_expected_token():
    model = tiny_model("llama")
    tokens = MlxLmPlain(model).run(PROMPT, 6, ()).tokens
    other = [*tokens[:4], (tokens[4] + 1) % 60, tokens[5]]
    assert first_difference(model, PROMPT, tokens, tokens) is None
    found = first_difference(model, PROMPT, other, tokens)
    assert found["at_token"] == 4
    assert found["logit_margin"] > 0
    assert first_difference(model, PROMPT, tokens[:3], tokens) == {
        "at_token": 3,
        "logit_margin": None,
    }


def test_the_drafts_of_a_run_are_told_round_by_round():
    model = tiny_model("llama")
    engine = StaticShapeEngine(model, tile_widths=(1, 4))
    text = PROMPT + MlxLmPlain(model).run(PROMPT, LIMIT, ()).tokens

    class Oracle(PromptLookup):
        def propose(self, history, budget):
            return text[len(history) : len(history) + budget]

    run = Mlxspec("oracle", model, engine, Oracle, 3).run(PROMPT, LIMIT, ())
    assert sum(length for _, length in run.details["drafts"]) == run.details["stats"]["drafted"]
    assert len(run.details["drafts"]) == run.details["stats"]["rounds"]
    # Every draft is right, so a round brings its draft and one token more.
    starts = [start for start, _ in run.details["drafts"]]
    ends = [start + length + 1 for start, length in run.details["drafts"]]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == LIMIT


def test_a_table_says_what_it_was_given():
    assert markdown_table(("a", "bc"), [("def", 1)]).splitlines() == [
        "| a   | bc |",
        "|-----|----|",
        "| def | 1  |",
    ]
