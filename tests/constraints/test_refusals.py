"""What cannot be matched is refused, with the reason and before anything is run."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizer

import mlxspec
from mlxspec import Grammar, GrammarError, NonFiniteLogits, StaticShapeEngine
from tests.cases import varied_model
from tests.constraints.vocabularies import PADDED_SIZE, VOCABULARIES
from tests.decoding.text import loaded

SCHEMAS = [
    ("{", "expected JSON, got {"),
    ("[" * 100_000, "expected JSON, got [[["),
    ("3", "expected an object, true or false, got 3"),
    ([{"type": "string"}], "expected a dictionary of JSON values or its text"),
    ({"enum": {1, 2}}, "expected a dictionary of JSON values or its text"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"type": "string", "minLength": "x"}, "Expected positive integer for 'minLength'"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "^(?!a)"}, "look-ahead"),
    ({"type": "string", "format": "nosuch"}, "Unknown format: nosuch"),
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, "oneOf constraints are not supported"),
    ({"$ref": "#/x"}, "Pointer '/x' does not exist"),
    ({"$ref": "http://nowhere.invalid/x.json"}, "does not fetch"),
    (False, "no text satisfies false"),
    ("false", "no text satisfies false"),
    ({"enum": []}, "Unsatisfiable schema"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "Too many items",
    ),
    ({"x-guidance": {"nosuch": True}}, "unknown field `nosuch`"),
    ({"x-guidance": 7}, "x-guidance: expected an object, got 7"),
    ({"items": [{"pattern": "a\\"}]}, "pattern 'a\\\\': it ends in a backslash"),
    ({"patternProperties": {"(?x) a": {}}}, "pattern '(?x) a': verbose mode"),
    ({"properties": {"default": {"pattern": "(?x)"}}}, "pattern '(?x)': verbose mode"),
]
PATTERNS = [
    ("(", "unclosed group"),
    ("a{5,3}", "invalid repetition count range"),
    ("(?=a)b", "look-ahead"),
    (r"(a)\1", "backreferences are not supported"),
    (r"\bfoo", "lookarounds not supported"),
    (r"[^\s\S]", "no text satisfies it"),
    (r"a[^\s\S]", "no text satisfies it"),
    (3, "expected text that UTF-8 can say, got 3"),
    ("a\\", "ends in a backslash that escapes nothing"),
    ("(?i)a(?sx-m:b # c\n)", "verbose mode, (?x), is not supported"),
    (r"[]a](?x)\]", "verbose mode, (?x), is not supported"),
    ("(?" + "x" * 100_000, "duplicate flag"),
    ("half of \ud83d", "expected text that UTF-8 can say"),
]


class Untouched(nn.Module):
    """A model that is not looked at."""

    def __call__(self, *args, **options):
        pytest.fail("the model was run")


@pytest.mark.parametrize(("schema", "reason"), SCHEMAS)
def test_a_schema_that_cannot_be_matched_is_refused_with_the_reason(schema, reason):
    for call in (
        lambda: Grammar.from_json_schema(schema),
        lambda: mlxspec.generate(Untouched(), VOCABULARIES["bytes"](), "x", json_schema=schema),
    ):
        with pytest.raises(GrammarError) as refused:
            call()
        assert str(refused.value).startswith("JSON schema: ")
        assert reason in str(refused.value)


def test_what_only_looks_like_it_is_taken():
    Grammar.from_json_schema({"const": {"pattern": "a\\", "patternProperties": {"(?x)": 1}}})
    for pattern in (r"a\\", r"\(?x\)", "(?i-x:a)(?P<x>b)", "[(?x)]", "[^](?x:)][[a](?x)]"):
        Grammar.from_regex(pattern)


@pytest.mark.parametrize(("pattern", "reason"), PATTERNS)
def test_a_pattern_that_cannot_be_matched_is_refused_with_the_reason(pattern, reason):
    for call in (
        lambda: Grammar.from_regex(pattern),
        lambda: mlxspec.generate(Untouched(), VOCABULARIES["bytes"](), "x", regex=pattern),
    ):
        with pytest.raises(GrammarError) as refused:
            call()
        assert str(refused.value).startswith("regex: ")
        assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        (
            {
                "oneOf": [{"const": "a"}, {"maxLength": 1, "type": "string"}],
                "x-guidance": {"coerce_one_of": True},
            },
            "falling back to anyOf",
        ),
    ],
)
def test_what_a_schema_itself_lets_go_is_said(schema, note):
    assert note in " ".join(Grammar.from_json_schema(schema).notes)
    model = varied_model("llama", vocab_size=PADDED_SIZE)
    with pytest.warns(UserWarning, match=f"json_schema: .*{note}"):
        mlxspec.generate(model, VOCABULARIES["bytes"](), [1, 2], json_schema=schema, max_tokens=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": True, "regex": "a"}, "give one of them, not several"),
        ({"regex": "a", "constraint": object()}, "give one of them, not several"),
        ({"constraint": 3}, "expected something with end_tokens and matcher"),
        ({"constraint": Grammar.from_regex("a")}, "bind it: grammar.bind"),
        ({"regex": "a", "acceptance": "rejection", "temp": 1.0}, "acceptance='rejection'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options, expected):
    with pytest.raises(ValueError, match=expected):
        mlxspec.generate(Untouched(), VOCABULARIES["bytes"](), "x", **options)


@pytest.mark.parametrize("option", ["json_schema", "regex"])
def test_token_level_generation_says_how_to_give_it_a_grammar(option):
    with pytest.raises(
        ValueError, match=r"constraint=mlxspec\.Grammar\.from_.*\.bind\(tokenizer\)"
    ):
        mlxspec.generate_step([1], Untouched(), **{option: "a"})


def test_a_tokenizer_without_a_table_of_its_tokens_is_refused():
    class Slow(PreTrainedTokenizer):
        vocab_size = 2

        def get_vocab(self):
            return {"a": 0, "b": 1}

        def _convert_token_to_id(self, token):
            return 0

    with pytest.raises(GrammarError, match=r"tokenizer Slow: .*tokenizer\.json"):
        Grammar.from_regex("a").bind(Slow(eos_token="b"))


def test_a_vocabulary_of_a_kind_that_is_not_known_is_refused():
    tokenizer = Tokenizer.from_str(VOCABULARIES["bytes"]()._tokenizer.backend_tokenizer.to_str())
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(GrammarError, match=r"can't determine decoder type.*byte fallback"):
        Grammar.from_regex("a").bind(loaded(tokenizer, {"eos_token": "<end>"}))


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(GrammarError, match="names no end token"):
        Grammar.from_regex("a").bind(VOCABULARIES["bytes"](), end_tokens=[])


def test_end_tokens_are_tokens_of_the_tokenizer():
    grammar, tokenizer = Grammar.from_regex("a"), VOCABULARIES["bytes"]()
    with pytest.raises(GrammarError, match=r"end_tokens: none of 300, 301 is one of the"):
        grammar.bind(tokenizer, end_tokens=[301, 300])
    for wrong in ("b", -1, True):
        with pytest.raises(ValueError, match="end_tokens: expected a whole number"):
            grammar.bind(tokenizer, end_tokens=[wrong])


def step(**options):
    model = varied_model("llama", vocab_size=PADDED_SIZE)
    constraint = Grammar.from_regex("[ab]{9}").bind(VOCABULARIES["bytes"]())
    return list(mlxspec.generate_step([1, 2], model, constraint=constraint, **options))


def test_a_sampler_that_chooses_what_is_forbidden_is_refused():
    with pytest.raises(GrammarError, match=r"sampler chose token 3 at position 2"):
        step(sampler=lambda logprobs: mx.array([3]))


@pytest.mark.parametrize("late", range(5))
def test_a_refusal_at_any_row_of_a_block_leaves_what_was_emitted(late):
    """Drafts are in flight when the sampler goes wrong; the engine then goes on as if not."""
    network = varied_model("llama", vocab_size=PADDED_SIZE)
    engine = StaticShapeEngine(network, max_context_length=64)
    constraint = Grammar.from_regex("abab[xy]z").bind(VOCABULARIES["bytes"]())
    options = {"engine": engine, "constraint": constraint}
    whole = [token for token, _, _ in mlxspec.generate_step([1, 2], network, **options)]
    calls = []

    def sampler(logprobs):
        calls.append(1)
        return mx.array([3]) if len(calls) > late else mx.argmax(logprobs, axis=-1)

    steps = mlxspec.generate_step([1, 2], network, sampler=sampler, **options)
    emitted = [next(steps)[0] for _ in range(late)]
    with pytest.raises(GrammarError, match=f"sampler chose token 3 at position {late + 2}"):
        next(steps)
    assert emitted == whole[:late]
    assert list(engine.tokens) == [1, 2, *emitted][: late + 1]
    assert whole == [token for token, _, _ in mlxspec.generate_step([1, 2], network, **options)]


@pytest.mark.parametrize("value", [-mx.inf, float("nan")])
def test_processors_that_leave_no_allowed_token_are_refused(value):
    with pytest.raises(NonFiniteLogits, match="none of the 2 tokens that the grammar allows"):
        step(
            logits_processors=[
                lambda tokens, logits: mx.where(mx.arange(PADDED_SIZE) < 200, value, logits)
            ]
        )


def test_a_vocabulary_that_cannot_spell_the_text_is_refused_where_it_fails():
    model = varied_model("llama", vocab_size=20)
    constraint = Grammar.from_regex("a").bind(VOCABULARIES["bytes"]())
    with pytest.raises(GrammarError, match="at position 2 no token of the vocabulary"):
        list(mlxspec.generate_step([1, 2], model, constraint=constraint))
