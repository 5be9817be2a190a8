"""Under a grammar too: the text obeys, and no draft changes one token of it."""

from __future__ import annotations

import json
import re
import threading

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec import (
    Chain,
    DraftModel,
    DynamicShapeEngine,
    EngineBusy,
    Grammar,
    GrammarError,
    PromptLookup,
    SpeculationStats,
    StaticShapeEngine,
)
from mlxspec.assembly import make_decoder
from tests.cases import exact, varied_model
from tests.constraints.schemas import schemas
from tests.constraints.vocabularies import PADDED_SIZE, VOCABULARIES
from tests.hostile import PlannedDrafter, plans

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [5, 9, 2, 7]
GREEDY = {}
SAMPLED = {"temp": 1.0, "seed": 7}
FILTERED = {"temp": 1.3, "seed": 8, "top_k": 40, "min_p": 0.001, "top_p": 0.95}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])(, the cat sat)?"


def model():
    return varied_model("llama", vocab_size=PADDED_SIZE)


def said(vocabulary, *, max_tokens=1500, **options):
    """Every response, and the counters."""
    stats = SpeculationStats()
    responses = mlxspec.stream_generate(
        model(),
        VOCABULARIES[vocabulary](),
        PROMPT,
        max_tokens=max_tokens,
        max_context_length=2048,
        stats=stats,
        **options,
    )
    return list(responses), stats


def ids(responses):
    return [response.token for response in responses]


def text_of(responses):
    return "".join(response.text for response in responses)


def refuse_json(text, schema):
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@settings(max_examples=max(100, settings().max_examples))
@given(
    schema=schemas(),
    vocabulary=st.sampled_from(sorted(VOCABULARIES)),
    choosing=st.sampled_from([GREEDY, SAMPLED]),
    drafting=st.one_of(st.sampled_from(["nothing", "lookup"]), plans()),
)
def test_every_text_satisfies_its_schema_whatever_is_drafted(
    schema, vocabulary, choosing, drafting
):
    """A hundred schemas: plain and drafted are equal, end by themselves, and are valid JSON."""
    plain, plain_stats = said(vocabulary, json_schema=schema, num_draft_tokens=0, **choosing)
    if drafting == "nothing":
        drafter = None
    elif drafting == "lookup":
        drafter = PromptLookup(min_ngram=1)
    else:
        drafter = PlannedDrafter(PROMPT + ids(plain), drafting, PADDED_SIZE)
    drafted, stats = said(
        vocabulary, json_schema=schema, drafter=drafter, num_draft_tokens=9, **choosing
    )
    assert ids(drafted) == ids(plain)
    assert plain[-1].finish_reason == drafted[-1].finish_reason == "stop"
    assert text_of(drafted) == text_of(plain)
    refuse_json(text_of(plain), schema)
    assert stats.forced == plain_stats.forced
    assert stats.forwards == stats.rounds <= plain_stats.forwards


@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
@pytest.mark.parametrize("choosing", [GREEDY, SAMPLED, FILTERED])
def test_forced_tokens_are_counted_and_save_forwards_without_a_drafter(vocabulary, choosing):
    plain, plain_stats = said(vocabulary, json_schema=PERSON, num_draft_tokens=0, **choosing)
    drafted, stats = said(vocabulary, json_schema=PERSON, **choosing)
    assert ids(drafted) == ids(plain)
    assert stats.forced == plain_stats.forced >= 5
    assert stats.drafted == stats.accepted > 0, "what is forced is always accepted"
    # A round gives its accepted drafts and one token more, unless a drafted end token ends it.
    assert stats.forwards == len(plain) - stats.accepted + drafted[-1].from_draft
    assert plain_stats.drafted == 0
    assert plain_stats.why_off == "num_draft_tokens is 0"
    assert f"{stats.forced} forced by the grammar" in stats.summary()
    assert stats.as_dict()["forced"] == stats.forced


@pytest.mark.parametrize("choosing", [GREEDY, SAMPLED, FILTERED])
def test_log_probabilities_are_those_after_the_mask_and_equal_with_drafts(choosing):
    plain, _ = said("byte-level", json_schema=PERSON, num_draft_tokens=0, **choosing)
    drafted, _ = said(
        "byte-level", json_schema=PERSON, drafter=PromptLookup(min_ngram=1), **choosing
    )
    assert len(plain) == len(drafted)
    matcher = Grammar.from_json_schema(PERSON).bind(VOCABULARIES["byte-level"]()).matcher()
    for ours, theirs in zip(plain, drafted, strict=True):
        row = exact(ours.logprobs)
        assert (row == exact(theirs.logprobs)).all()
        allowed = matcher.allowed()
        assert ((row > -float("inf")).nonzero()[0] == allowed.nonzero()[0]).all()
        assert mx.logsumexp(ours.logprobs).item() == pytest.approx(0, abs=1e-5)
        matcher.consume(ours.token)


@pytest.mark.parametrize("choosing", [GREEDY, SAMPLED, FILTERED])
@pytest.mark.parametrize("chained", [False, True])
def test_a_draft_model_is_cut_and_extended_as_any_drafter(choosing, chained):
    """It knows nothing of the grammar, and the target's own text is what it would have said."""
    plain, plain_stats = said("byte-level", json_schema=PERSON, num_draft_tokens=0, **choosing)
    drafter = DraftModel(model())
    if chained:
        drafter = Chain(PromptLookup(min_ngram=2), drafter)
    drafted, stats = said(
        "byte-level", json_schema=PERSON, drafter=drafter, num_draft_tokens=6, **choosing
    )
    assert ids(drafted) == ids(plain)
    assert stats.forwards < plain_stats.forwards
    assert stats.draft_forwards > 0


@given(vocabulary=st.sampled_from(sorted(VOCABULARIES)), plan=plans(), seed=st.integers(0, 99))
def test_the_whole_text_matches_the_regex_whatever_is_drafted(vocabulary, plan, seed):
    choosing = {"temp": 1.0, "seed": seed}
    plain, _ = said(vocabulary, regex=DATE, num_draft_tokens=0, **choosing)
    drafter = PlannedDrafter(PROMPT + ids(plain), plan, PADDED_SIZE)
    drafted, _ = said(vocabulary, regex=DATE, drafter=drafter, **choosing)
    assert ids(drafted) == ids(plain)
    assert re.fullmatch(DATE, text_of(drafted))


@pytest.mark.parametrize("drafts", [0, 15])
def test_nothing_is_emitted_after_a_grammar_that_ends_inside_an_accepted_block(drafts):
    """The whole text is forced, end token included: one block holds it all."""
    engine = StaticShapeEngine(model(), max_context_length=256)
    tokenizer = VOCABULARIES["byte-level"]()
    regex = "yes, no, maybe"
    responses, stats = said_with(engine, tokenizer, regex=regex, num_draft_tokens=drafts)
    said_ids = [*tokenizer.encode(regex, add_special_tokens=False), tokenizer.eos_token_id]
    assert ids(responses) == said_ids
    assert text_of(responses) == regex
    assert responses[-1].finish_reason == "stop"
    assert list(engine.tokens) == PROMPT + said_ids[:-1]
    assert stats.forced == stats.emitted == len(said_ids)
    assert stats.forwards == (1 if drafts else len(said_ids))


def said_with(engine, tokenizer, **options):
    stats = SpeculationStats()
    responses = mlxspec.stream_generate(
        engine.model, tokenizer, PROMPT, engine=engine, stats=stats, **options
    )
    return list(responses), stats


def test_a_draft_that_runs_past_the_end_of_the_grammar_is_cut_there():
    tokenizer = VOCABULARIES["byte-level"]()
    plain, _ = said("byte-level", regex="(yes|no)", num_draft_tokens=0)
    beyond = PROMPT + ids(plain) + [3, 4, 5, 6]
    drafter = PlannedDrafter(beyond, [("right", 9)], PADDED_SIZE)
    drafted, stats = said("byte-level", regex="(yes|no)", drafter=drafter)
    assert ids(drafted) == ids(plain)
    assert drafted[-1].token == tokenizer.eos_token_id
    assert stats.drafted <= len(plain)


@pytest.mark.parametrize("count", range(1, 14))
def test_max_tokens_cuts_the_text_and_says_so(count):
    plain, _ = said("byte-level", json_schema=PERSON, num_draft_tokens=0)
    cut, _ = said("byte-level", json_schema=PERSON, max_tokens=count)
    assert ids(cut) == ids(plain)[:count]
    assert cut[-1].finish_reason == "length"


def test_an_open_schema_and_a_model_that_does_not_end_are_cut_at_max_tokens():
    """Nothing makes a model close a string that may go on for ever."""
    tokenizer = VOCABULARIES["byte-level"]()
    quotes = [i for i in range(len(tokenizer)) if '"' in tokenizer.decode([i])]
    bias = mx.zeros(PADDED_SIZE)
    bias[mx.array(quotes)] = -1000
    never_ends = [lambda tokens, logits: logits + bias]
    schema = {"type": "string"}
    responses, _ = said(
        "byte-level", json_schema=schema, max_tokens=60, logits_processors=never_ends
    )
    assert (len(responses), responses[-1].finish_reason) == (60, "length")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text_of(responses))


def penalty(tokens, logits):
    """A processor that depends on the whole history: what was said is less likely again."""
    return logits - 2.0 * mx.zeros(logits.shape[-1]).at[tokens].add(1.0)


def likeliest_but_one(logprobs):
    """A sampler: the second choice where there is one."""
    order = mx.argsort(-logprobs, axis=-1)
    second = order[:, 1]
    has_second = mx.take_along_axis(logprobs, second[:, None], -1)[:, 0] > -mx.inf
    return mx.where(has_second, second, order[:, 0])


@pytest.mark.parametrize(
    "choosing",
    [
        {"logits_processors": [penalty]},
        {"logits_processors": [penalty], **SAMPLED},
        {"sampler": likeliest_but_one},
        {"sampler": likeliest_but_one, "logits_processors": [penalty]},
    ],
    ids=["processor", "processor, sampled", "sampler", "both"],
)
@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
def test_processors_and_samplers_of_the_caller_obey_the_grammar_too(vocabulary, choosing):
    plain, plain_stats = said(vocabulary, json_schema=PERSON, num_draft_tokens=0, **choosing)
    refuse_json(text_of(plain), PERSON)
    for drafter in (None, PromptLookup(min_ngram=1)):
        drafted, stats = said(vocabulary, json_schema=PERSON, drafter=drafter, **choosing)
        assert ids(drafted) == ids(plain)
        assert stats.forced == plain_stats.forced
        assert stats.forwards < plain_stats.forwards


def test_processors_come_before_the_mask_so_that_none_revives_a_forbidden_token():
    def insists(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == 3, 1e4, logits)

    responses, _ = said("byte-level", json_schema=PERSON, logits_processors=[insists])
    refuse_json(text_of(responses), PERSON)


def test_rows_chosen_at_once_and_one_after_the_other_are_the_same():
    at_once, _ = said("byte-level", json_schema=PERSON, **SAMPLED)
    one_by_one, _ = said(
        "byte-level", json_schema=PERSON, logits_processors=[lambda tokens, row: row], **SAMPLED
    )
    assert ids(at_once) == ids(one_by_one)


def test_the_dynamic_engine_obeys_plainly():
    engine = DynamicShapeEngine(model(), max_context_length=2048)
    static, static_stats = said("byte-level", json_schema=PERSON)
    dynamic, stats = said_with(engine, VOCABULARIES["byte-level"](), json_schema=PERSON)
    assert ids(dynamic) == ids(static)
    assert (stats.drafted, stats.forced) == (0, static_stats.forced)
    assert "decodes plainly" in stats.why_off


@pytest.mark.parametrize("stop", range(0, 30, 3))
def test_a_text_that_was_left_at_any_row_leaves_nothing_for_the_next(stop):
    """Generators closed inside a block, then the same constraint again: it begins anew."""
    tokenizer = VOCABULARIES["byte-level"]()
    constraint = Grammar.from_json_schema(PERSON).bind(tokenizer)
    engine = StaticShapeEngine(model(), max_context_length=512)
    options = {"engine": engine, "constraint": constraint, "drafter": PromptLookup(min_ngram=1)}
    steps = mlxspec.generate_step(PROMPT, model(), **options)
    left = [next(steps)[0] for _ in range(stop + 1)]
    steps.close()
    assert list(engine.tokens) == PROMPT + left[:-1]
    whole = [token for token, _, _ in mlxspec.generate_step(PROMPT, model(), **options)]
    assert whole[: len(left)] == left
    refuse_json(tokenizer.decode(whole[:-1]), PERSON)


@pytest.mark.parametrize("stop", [0, 3, 11])
def test_one_decoder_begins_its_grammar_anew_for_every_text(stop):
    constraint = Grammar.from_json_schema(PERSON).bind(VOCABULARIES["byte-level"]())
    decoder = make_decoder(model(), constraint=constraint, prompt_lookup=True)
    ends = constraint.end_tokens
    whole = [emission.token for emission in decoder.generate(PROMPT, stop_tokens=ends)]
    left = decoder.generate(PROMPT, stop_tokens=ends)
    assert [next(left).token for _ in range(stop + 1)] == whole[: stop + 1]
    left.close()
    assert [emission.token for emission in decoder.generate(PROMPT, stop_tokens=ends)] == whole


def test_after_an_exception_the_same_constraint_begins_anew():
    class Fails(PromptLookup):
        def propose(self, history, budget):
            if len(history) > len(PROMPT) + 6:
                raise RuntimeError("no more")
            return super().propose(history, budget)

    constraint = Grammar.from_json_schema(PERSON).bind(VOCABULARIES["byte-level"]())
    with pytest.raises(RuntimeError, match="no more"):
        said("byte-level", constraint=constraint, drafter=Fails())
    again, _ = said("byte-level", constraint=constraint)
    assert ids(again) == ids(said("byte-level", json_schema=PERSON)[0])


def test_one_constraint_serves_several_threads_at_once():
    constraint = Grammar.from_json_schema(PERSON).bind(VOCABULARIES["byte-level"]())
    expected = {
        seed: ids(said("byte-level", json_schema=PERSON, temp=1.0, seed=seed)[0])
        for seed in (1, 2, 3)
    }
    found = {}

    def work(seed):
        found[seed] = ids(said("byte-level", constraint=constraint, temp=1.0, seed=seed)[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_two_generations_of_one_constraint_interleave():
    constraint = Grammar.from_json_schema(PERSON).bind(VOCABULARIES["byte-level"]())
    options = {"constraint": constraint, "max_context_length": 2048}
    alone = [token for token, _, _ in mlxspec.generate_step(PROMPT, model(), **options)]
    pair = [mlxspec.generate_step(PROMPT, model(), **options) for _ in range(2)]
    both = [(first[0], second[0]) for first, second in zip(*pair, strict=True)]
    assert both == [(token, token) for token in alone]


def test_the_prompt_is_no_part_of_what_is_matched():
    tokenizer = VOCABULARIES["byte-level"]()
    engine = StaticShapeEngine(model(), max_context_length=512)
    for prompt in ('{"name": "x"', "[", "no"):
        responses = list(
            mlxspec.stream_generate(model(), tokenizer, prompt, engine=engine, json_schema=PERSON)
        )
        refuse_json(text_of(responses), PERSON)


# Once it has begun, an array of arrays that are not empty has no end: llguidance gives up.
ENDLESS = {
    "anyOf": [{"$ref": "#/$defs/endless"}, {"const": 1}],
    "$defs": {"endless": {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1}},
}


class _FailsAfter:
    """A constraint of as and bs, of which nothing can be told after so many bs."""

    end_tokens = (0,)

    def __init__(self, where, most):
        self.where, self.most = where, most

    def matcher(self):
        return _FailingMatcher(self.where, self.most)


class _FailingMatcher:
    def __init__(self, where, most):
        self.where, self.most = where, most
        self.tokens, self.failed = [], False

    def _refuse(self, where):
        self.failed |= where == self.where and self.tokens.count(98) > self.most
        if self.failed:
            raise GrammarError("it grew too large")

    def allowed(self):
        self._refuse("allowed")
        return np.isin(np.arange(PADDED_SIZE), (97, 98))

    def consume(self, token):
        self.tokens.append(token)
        self._refuse("consume")

    def rollback(self, count):
        # As llguidance's: once it has failed it stays so.
        self._refuse("rollback")
        del self.tokens[len(self.tokens) - count :]


def _ended(constraint, wanted, drafter=None):
    """Tokens, and the error that ended them, of a model that is made to say what is wanted."""

    def say(tokens, logits):
        return mx.where(mx.arange(PADDED_SIZE) == wanted(len(tokens)), 100.0, logits)

    steps = mlxspec.generate_step(
        PROMPT,
        model(),
        constraint=constraint,
        logits_processors=[say],
        drafter=drafter,
        num_draft_tokens=7 if drafter else 0,
        max_tokens=12,
    )
    tokens = []
    try:
        for token, *_ in steps:
            tokens.append(token)
    except GrammarError as problem:
        return tokens, str(problem)
    return tokens, None


@pytest.mark.parametrize("where", ["allowed", "consume"])
def test_a_guess_that_the_grammar_fails_at_ends_no_text(where):
    """The text is plain decoding's, and so is where it fails if it says such a thing itself."""
    begin, failures = len(PROMPT), 0
    for most, rhythm in ((0, 100), (0, 3), (1, 4), (2, 2)):
        constraint = _FailsAfter(where, most)

        def wanted(length, rhythm=rhythm):
            return 98 if (length - begin + 1) % rhythm == 0 else 97

        plain = _ended(constraint, wanted)
        failures += plain[1] is not None
        text = PROMPT + [wanted(length) for length in range(begin, begin + 20)]
        for plan in ([("wrong", 7)], [("right", 7)], [("right then wrong", 6), ("right", 3)]):
            # A wrong a is a b.
            drafter = PlannedDrafter(text, plan, PADDED_SIZE)
            assert _ended(constraint, wanted, drafter) == plain
            assert len(drafter.histories) > 0
    assert failures == 3


@pytest.mark.parametrize("said", ["1", "["])
def test_a_guess_that_has_no_end_ends_no_text(said):
    tokenizer = VOCABULARIES["bytes"]()
    constraint = Grammar.from_json_schema(ENDLESS).bind(tokenizer)
    said, guess = (tokenizer.encode(c, add_special_tokens=False)[0] for c in (said, "["))
    plain = _ended(constraint, lambda length: said)
    assert (plain[1] is None) == (said != guess)
    drafter = PlannedDrafter([guess] * 40, [("right", 7)], PADDED_SIZE)
    assert _ended(constraint, lambda length: said, drafter) == plain


def test_a_stop_string_ends_a_text_before_its_grammar_does():
    responses, _ = said("byte-level", json_schema=PERSON, stop_strings=['"age"'])
    assert text_of(responses).endswith(", ")
    assert responses[-1].finish_reason == "stop"


def test_the_drafter_is_asked_for_what_follows_the_forced_tokens():
    """A forced name and a guessed value then share one forward."""
    plain, _ = said("byte-level", json_schema=PERSON, num_draft_tokens=0)
    drafter = PlannedDrafter(PROMPT + ids(plain), [("right", 4)], PADDED_SIZE)
    _, stats = said("byte-level", json_schema=PERSON, drafter=drafter, num_draft_tokens=15)
    forced_only = said("byte-level", json_schema=PERSON, num_draft_tokens=15)[1]
    assert len(drafter.histories[0]) > len(PROMPT)
    assert drafter.histories[0] == (PROMPT + ids(plain))[: len(drafter.histories[0])]
    assert stats.forwards < forced_only.forwards


def test_an_engine_in_use_refuses_a_second_constrained_text():
    engine = StaticShapeEngine(model(), max_context_length=256)
    constraint = Grammar.from_regex("a+").bind(VOCABULARIES["byte-level"]())
    first = mlxspec.generate_step(PROMPT, model(), engine=engine, constraint=constraint)
    next(first)
    with pytest.raises(EngineBusy):
        mlxspec.generate_step(PROMPT, model(), engine=engine, constraint=constraint)
    first.close()


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gemma4_text", "lfm2", "qwen3_next", "mamba2"]
)
@pytest.mark.parametrize("choosing", [GREEDY, SAMPLED])
def test_windows_recurrent_layers_and_shared_keys_obey_a_grammar_too(family, choosing):
    """Rejected drafts are taken back in all of them, while the grammar goes on from what stays."""
    tokenizer = VOCABULARIES["byte-level"]()
    network = varied_model(family, vocab_size=PADDED_SIZE)

    def run(**options):
        stats = SpeculationStats()
        responses = list(
            mlxspec.stream_generate(
                network, tokenizer, PROMPT, json_schema=PERSON, stats=stats, **choosing, **options
            )
        )
        return responses, stats

    plain, _ = run(num_draft_tokens=0)
    refuse_json(text_of(plain), PERSON)
    plan = [("right then wrong", 6), ("right", 3), ("wrong", 4), ("right", 9)]
    for drafter in (None, PlannedDrafter(PROMPT + ids(plain), plan, PADDED_SIZE)):
        drafted, stats = run(drafter=drafter)
        assert ids(drafted) == ids(plain)
        assert stats.accepted > 0
        for ours, theirs in zip(drafted, plain, strict=True):
            assert (exact(ours.logprobs) == exact(theirs.logprobs)).all()
