"""A matcher's state is a function of the tokens that were consumed, and of nothing else."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import Constraint, Grammar, GrammarError
from mlxspec.constraints.lookahead import Lookahead
from tests.cases import varied_model
from tests.constraints.schemas import schemas
from tests.constraints.vocabularies import PADDED_SIZE, VOCABULARIES

vocabularies = st.sampled_from(sorted(VOCABULARIES))


def after(constraint, tokens):
    """What a new matcher allows after these tokens."""
    matcher = constraint.matcher()
    for token in tokens:
        matcher.consume(token)
    return matcher.allowed()


def some_allowed(data, row):
    return data.draw(st.sampled_from(np.flatnonzero(row).tolist()))


@given(data=st.data(), schema=schemas(), vocabulary=vocabularies)
def test_what_was_looked_at_and_taken_back_leaves_no_trace(data, schema, vocabulary):
    """Walks of any kind: the rows are those of a new matcher that consumed the emitted tokens."""
    constraint = Grammar.from_json_schema(schema).bind(VOCABULARIES[vocabulary]())
    lookahead = Lookahead(constraint, PADDED_SIZE)
    size = len(constraint.matcher().allowed())
    emitted: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        draft = []
        if data.draw(st.booleans()):
            lookahead.restart()
            draft = lookahead.go_where_forced(data.draw(st.integers(0, 5)))
        for _ in range(data.draw(st.integers(0, 4))):
            row = after(constraint, emitted + draft)
            if not row.any():
                break
            draft.append(some_allowed(data, row))
        wrong = data.draw(st.integers(0, len(constraint.matcher().allowed()) - 1))
        guess = draft + [wrong] * data.draw(st.booleans())
        if data.draw(st.booleans()):
            lookahead.restart()
            assert lookahead.go_along(guess) >= len(draft)
        # A draft whose rows hold no number is dropped: then the anchor's row alone is masked.
        guess = data.draw(st.sampled_from([guess, guess[:1], []]))
        rows = lookahead.rows_along(guess)
        assert len(rows) == len(guess) + 1
        for place in range(min(len(guess), len(draft)) + 1):
            expected = after(constraint, emitted + draft[:place])
            assert (rows[place, :size] == expected).all()
            assert not rows[place, size:].any()
        kept = draft[: data.draw(st.integers(0, len(draft)))]
        for token in kept:
            assert lookahead.allowed()[token]
            lookahead.emit(token)
        emitted += kept
        if not after(constraint, emitted).any():
            return
        if data.draw(st.booleans()):
            emitted.append(some_allowed(data, after(constraint, emitted)))
            lookahead.emit(emitted[-1])
        if not after(constraint, emitted).any():
            return


@given(vocabulary=vocabularies, texts=st.lists(st.sampled_from(["a", "ab", "b"]), max_size=4))
def test_end_tokens_are_allowed_exactly_where_the_text_may_end(vocabulary, texts):
    tokenizer = VOCABULARIES[vocabulary]()
    constraint = Grammar.from_regex("(ab)*").bind(tokenizer)
    matcher = constraint.matcher()
    text = "".join(texts)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.allowed()[token]:
            return
        matcher.consume(token)
    assert matcher.allowed()[tokenizer.eos_token_id] == (text == "ab" * (len(text) // 2))


def test_every_end_token_is_allowed_and_only_they_where_the_text_is_complete():
    tokenizer = VOCABULARIES["byte-level"]()
    other = tokenizer.convert_tokens_to_ids("<other>")
    ends = {tokenizer.eos_token_id, other}
    matcher = Grammar.from_regex("no").bind(tokenizer, end_tokens=ends).matcher()
    assert not matcher.allowed()[list(ends)].any()
    for token in tokenizer.encode("no", add_special_tokens=False):
        matcher.consume(token)
    assert set(np.flatnonzero(matcher.allowed())) == ends
    matcher.consume(other)
    assert not matcher.allowed().any()
    with pytest.raises(GrammarError, match="after the end"):
        matcher.consume(other)
    matcher.rollback(1)
    assert set(np.flatnonzero(matcher.allowed())) == ends
    matcher.rollback(1)
    assert not matcher.allowed()[list(ends)].any()


def test_the_end_tokens_are_the_union_that_the_tokenizer_knows():
    tokenizer = VOCABULARIES["byte-level"]()
    other = tokenizer.convert_tokens_to_ids("<other>")
    before = set(tokenizer.eos_token_ids)
    try:
        tokenizer.add_eos_token(str(other))
        assert Grammar.from_regex("no").bind(tokenizer).end_tokens == before | {other}
    finally:
        tokenizer.eos_token_ids.discard(other)
    assert Grammar.from_regex("no").bind(tokenizer).end_tokens == before


def test_an_end_token_that_is_also_a_letter_ends_the_text_and_is_never_part_of_it():
    tokenizer = VOCABULARIES["bytes"]()
    letter = tokenizer.encode("!", add_special_tokens=False)[0]
    constraint = Grammar.from_regex("[a!]*b").bind(tokenizer, end_tokens=[letter])
    matcher = constraint.matcher()
    assert not matcher.allowed()[letter]
    matcher.consume(tokenizer.encode("b", add_special_tokens=False)[0])
    assert np.flatnonzero(matcher.allowed()).tolist() == [letter]


@pytest.mark.parametrize("text", ["<end>", "a<other>b", "é<end><end>"])
def test_special_tokens_are_no_way_to_spell_text(text):
    """The text of an end token inside a string is spelled in pieces."""
    tokenizer = VOCABULARIES["byte-level"]()
    constraint = Grammar.from_json_schema({"const": text}).bind(tokenizer)
    matcher = constraint.matcher()
    said = []
    while (row := matcher.allowed()).any():
        assert row.sum() == 1
        said.append(int(row.argmax()))
        matcher.consume(said[-1])
    assert said[-1] == tokenizer.eos_token_id
    assert not {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<other>")} & {*said[:-1]}
    assert json.loads(tokenizer.decode(said[:-1])) == text


@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
def test_a_forced_text_is_written_in_the_tokenizers_own_tokens(vocabulary):
    tokenizer = VOCABULARIES[vocabulary]()
    text = '{"name": "Margit Aune", "age": 41}'
    lookahead = Lookahead(
        Grammar.from_json_schema({"const": json.loads(text)}).bind(tokenizer), PADDED_SIZE
    )
    forced = lookahead.go_where_forced(99)
    own = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.convert_ids_to_tokens(own[0]) == "▁":
        del own[0]  # an answer goes on from the prompt and has no space before it
    assert forced == [*own, tokenizer.eos_token_id]
    assert tokenizer.decode(forced[:-1]) == text


def test_rows_of_logits_beyond_the_tokenizer_are_masked_and_missing_ones_are_left_out():
    tokenizer = VOCABULARIES["byte-level"]()
    constraint = Grammar.from_regex("(.|\n)*").bind(tokenizer)
    wide = Lookahead(constraint, PADDED_SIZE).allowed()
    narrow = Lookahead(constraint, 100).allowed()
    assert wide[:100].any()
    assert not wide[len(tokenizer) :].any()
    assert narrow.tolist() == wide[:100].tolist()
    for size in (100, len(tokenizer), PADDED_SIZE):
        steps = mlxspec.generate_step(
            [1, 2, 3],
            varied_model("llama", vocab_size=size),
            constraint=constraint,
            temp=1.0,
            seed=1,
            max_tokens=30,
        )
        assert all(token < min(size, len(tokenizer)) for token, _, _ in steps)


class OnlyEven:
    """A constraint of a user's own: even ids, then the end after five."""

    end_tokens = (7,)

    def matcher(self):
        class Matcher:
            count = 0

            def allowed(self):
                if self.count > 5:
                    return [False]
                row = np.arange(60) % 2 == 0
                return np.arange(60) == 7 if self.count == 5 else row

            def consume(self, token):
                self.count += 1

            def rollback(self, count):
                self.count -= count

        return Matcher()


@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_a_constraint_of_your_own_needs_no_tokenizer(engine):
    assert isinstance(OnlyEven(), Constraint)
    model = varied_model("llama", vocab_size=PADDED_SIZE)
    options = {"constraint": OnlyEven(), "engine": engine, "max_tokens": 20}
    tokens = [token for token, _, _ in mlxspec.generate_step([1, 2, 3], model, **options)]
    assert len(tokens) == 6
    assert tokens[-1] == 7
    assert all(token % 2 == 0 and token < 60 for token in tokens[:-1])
    options["prompt_lookup"] = engine == "static"
    assert tokens == [token for token, _, _ in mlxspec.generate_step([1, 2, 3], model, **options)]


@given(data=st.data(), schema=schemas())
def test_no_special_token_but_an_end_is_ever_allowed(data, schema):
    tokenizer = VOCABULARIES["byte-level"]()
    other = tokenizer.convert_tokens_to_ids("<other>")
    matcher = Grammar.from_json_schema({"anyOf": [schema, {"type": "string"}]}).bind(tokenizer)
    matcher = matcher.matcher()
    for _ in range(20):
        row = matcher.allowed()
        assert not row[other]
        if row[tokenizer.eos_token_id] or not row.any():
            return
        matcher.consume(some_allowed(data, row))


NAMED = {"a": {"type": "boolean"}, "b": {"type": "null"}}
KINDS = {
    "maxProperties": {"type": "object", "properties": NAMED, "maxProperties": 1},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a[0-9]$": {"type": "boolean"}, "^b$": {"type": "null"}},
        "maxProperties": 3,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    },
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"const": 1}, {"enum": ["x", "y"]}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    },
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "exclusive": {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "pattern and length": {"type": "string", "pattern": "a+b", "minLength": 3, "maxLength": 6},
    "allOf": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0}},
                "additionalProperties": False,
            },
            {"properties": {"a": {"maximum": 20}}, "required": ["a"]},
        ]
    },
    "anyOf beside type": {
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "type": "object",
        "properties": NAMED,
    },
    "$ref": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "boolean"}]},
    "types": {"type": ["string", "integer"], "maxLength": 2, "minimum": 3, "maximum": 5},
    "no type": {"maxLength": 3, "minimum": 2, "maximum": 5, "maxItems": 0, "maxProperties": 0},
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 5,
    },
    "escapes": {"properties": {'\u0000\n"\\/é😀': {"const": "\u0007"}}, "type": "object"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
def test_what_a_schema_says_is_honoured_where_it_is_not_refused(kind, vocabulary):
    """Random walks through all that is allowed, judged by another implementation."""
    schema = KINDS[kind]
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        schema = schema | {"additionalProperties": False}
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    judge = validator(schema, format_checker=validator.FORMAT_CHECKER)
    tokenizer = VOCABULARIES[vocabulary]()
    constraint = Grammar.from_json_schema(schema).bind(tokenizer)
    walk = random.Random(0)
    ended = 0
    for _ in range(8):
        matcher, said = constraint.matcher(), []
        while len(said) < 150:
            allowed = np.flatnonzero(matcher.allowed()).tolist()
            token = walk.choice(allowed)
            if tokenizer.eos_token_id in allowed and walk.random() < 0.5:
                token = tokenizer.eos_token_id
            if token == tokenizer.eos_token_id:
                judge.validate(json.loads(tokenizer.decode(said)))
                ended += 1
                break
            said.append(token)
            matcher.consume(token)
    assert ended >= 4
