"""SmolLM2 under a schema: valid JSON, the same with and without drafts, in fewer forwards."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

import mlxspec
from mlxspec import PromptLookup, SpeculationStats, StaticShapeEngine
from tests.real.test_smollm2 import prompt_ids

YEAR = {"type": "integer", "minimum": 1500, "maximum": 2025}
BORN = {
    "type": "object",
    "properties": {"born": YEAR, "occupation": {"enum": ["mathematician", "painter"]}},
    "required": ["born", "occupation"],
    "additionalProperties": False,
}
PERSON = BORN | {
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": YEAR,
        "alive": {"type": "boolean"},
        "languages": {
            "type": "array",
            "items": {"enum": ["English", "French", "<|im_end|>"]},
            "minItems": 1,
            "maxItems": 2,
        },
        "mother": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 12}]},
    },
    "required": ["name", "born", "alive", "languages", "mother"],
}
EVENTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "what": {"enum": ["a storm", "a fire", "a birth", "nothing"]},
        },
        "required": ["date", "what"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 3,
}
ADA = "Ada Lovelace, born in 1815, was a mathematician. Describe her as JSON."


@pytest.fixture(scope="module")
def engine():
    """One for all: a question that it has read is not read again."""
    made = []

    def get(model):
        if not made:
            made.append(StaticShapeEngine(model, max_context_length=512, tile_widths=(1, 2, 4, 8)))
        return made[0]

    return get


def said(demo, engine, question, **options):
    model, tokenizer = demo("smollm2:bf16")
    stats = SpeculationStats()
    responses = list(
        mlxspec.stream_generate(
            model,
            tokenizer,
            prompt_ids(tokenizer, question),
            max_tokens=200,
            engine=engine(model),
            stats=stats,
            **options,
        )
    )
    return responses, stats


def compare(demo, engine, question, **options):
    """Plain, and drafted by the grammar and by lookup: one text; the counters of both."""
    plain, plain_stats = said(demo, engine, question, num_draft_tokens=0, **options)
    drafted, stats = said(demo, engine, question, drafter=PromptLookup(min_ngram=1), **options)
    assert [r.token for r in drafted] == [r.token for r in plain]
    assert plain[-1].finish_reason == "stop"
    assert stats.forced == plain_stats.forced
    assert stats.forwards == stats.rounds < plain_stats.forwards
    return "".join(r.text for r in plain), stats


def test_a_short_answer_is_valid_json_and_its_forced_tokens_are_drafted(demo, engine):
    text, stats = compare(demo, engine, ADA, json_schema=BORN)
    jsonschema.validate(json.loads(text), BORN)
    assert json.loads(text)["occupation"] == "mathematician"
    assert stats.forced >= 8
    assert stats.forwards_saved >= 8


@pytest.mark.deep
@pytest.mark.parametrize("choosing", [{}, {"temp": 0.8, "seed": 5}])
@pytest.mark.parametrize("schema", [PERSON, EVENTS], ids=["person", "events"])
def test_long_answers_are_valid_json_whatever_is_drafted(demo, engine, schema, choosing):
    text, stats = compare(demo, engine, ADA, json_schema=schema, **choosing)
    jsonschema.validate(json.loads(text), schema)
    assert stats.forced > 0


@pytest.mark.deep
def test_an_answer_is_what_a_regex_says(demo, engine):
    pattern = r"(yes|no), because [a-z ]{5,60}\."
    text, _ = compare(demo, engine, "Is Paris in France?", regex=pattern)
    assert re.fullmatch(pattern, text)
