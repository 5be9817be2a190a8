"""Drafter-invariance: whatever is proposed, the tokens are plain decoding's, id by id."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from mlxspec import (
    DynamicShapeEngine,
    PromptLookup,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
)
from tests.families.tiny import tiny_model
from tests.hostile import KINDS, PlannedDrafter, plans

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "smollm3",
    "gemma2",
    "starcoder2",
    "olmo2",
    "cohere",
)
SETUPS = (
    ((1, 2, 4, 8, 16), "free"),
    ((1, 3, 5), "free"),
    ((4,), "free"),
    ((2,), "aligned"),
    ((8,), "aligned"),
    ((16,), "aligned"),
)
N = 70


@cache
def model_of(family):
    return tiny_model(family)


@cache
def engine_of(family, setup=SETUPS[0]):
    widths, placement = setup
    return StaticShapeEngine(
        model_of(family),
        max_context_length=N,
        tile_widths=widths,
        placement=placement,
        prefill_step_size=16,
        span_step=16,
    )


def prompt_of(length, seed=0):
    return [(5 * i + 11 * seed + i * i // 3) % 60 + 1 for i in range(length)]


@cache
def plain(family, length, seed, max_tokens):
    """What mlx-lm itself says."""
    prompt = mx.array(prompt_of(length, seed))
    steps = mlx_lm_generate_step(prompt, model_of(family), max_tokens=max_tokens)
    return [int(token) for token, _ in steps]


def run(engine, prompt, drafter=None, *, max_tokens=-1, stop_tokens=(), **options):
    decoder = SpeculativeDecoder(engine, drafter, SpeculativeDecodingOptions(**options))
    emissions = list(decoder.generate(prompt, max_tokens=max_tokens, stop_tokens=stop_tokens))
    return emissions, decoder.stats


def ids(emissions):
    return [emission.token for emission in emissions]


@given(
    family=st.sampled_from(FAMILIES),
    setup=st.sampled_from(SETUPS),
    length=st.integers(1, N - 1),
    seed=st.integers(0, 3),
)
def test_plain_decoding_equals_mlx_lm_up_to_a_full_context(family, setup, length, seed):
    emissions, stats = run(engine_of(family, setup), prompt_of(length, seed))
    assert ids(emissions) == plain(family, length, seed, N - length)
    assert emissions[-1].finish_reason == "length"
    assert not any(emission.from_draft for emission in emissions)
    assert stats.rounds == stats.forwards == stats.plain_rounds == len(emissions)
    assert not stats.speculating


@given(
    family=st.sampled_from(FAMILIES),
    setup=st.sampled_from(SETUPS),
    length=st.integers(1, N - 1),
    seed=st.integers(0, 3),
    plan=plans(),
    num_draft_tokens=st.integers(0, 18),
    align=st.booleans(),
    max_tokens=st.sampled_from([-1, 1, 2, 9, 33]),
)
def test_no_drafter_changes_a_token(
    family, setup, length, seed, plan, num_draft_tokens, align, max_tokens
):
    expected = plain(family, length, seed, N - length)
    if max_tokens > 0:
        expected = expected[:max_tokens]
    engine = engine_of(family, setup)
    prompt = prompt_of(length, seed)
    drafter = PlannedDrafter(prompt + expected, plan, engine.vocab_size)
    emissions, stats = run(
        engine,
        prompt,
        drafter,
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        align_proposals=align,
    )
    assert ids(emissions) == expected
    assert [emission.finish_reason for emission in emissions[:-1]] == [None] * (len(expected) - 1)
    assert emissions[-1].finish_reason == "length"
    assert list(engine.tokens) == (prompt + expected)[:-1]
    assert stats.emitted == len(expected) == stats.rounds + stats.accepted
    assert stats.accepted == sum(emission.from_draft for emission in emissions)
    assert stats.accepted <= stats.drafted
    assert stats.forwards >= stats.rounds
    if align:
        assert stats.forwards == stats.rounds
    for history in drafter.histories:
        assert history == (prompt + expected)[: len(history)]


@given(
    family=st.sampled_from(FAMILIES[:4]),
    setup=st.sampled_from(SETUPS),
    length=st.integers(1, 30),
    plan=plans(),
    data=st.data(),
)
def test_every_token_may_be_the_stop_token_and_nothing_follows_it(
    family, setup, length, plan, data
):
    expected = plain(family, length, 0, 36)
    stop = data.draw(st.sampled_from(expected))
    cut = expected.index(stop) + 1
    max_tokens = data.draw(st.sampled_from([36, cut, cut + 1]))
    engine, prompt = engine_of(family, setup), prompt_of(length)
    drafter = PlannedDrafter(prompt + expected, plan, engine.vocab_size)
    emissions, stats = run(engine, prompt, drafter, max_tokens=max_tokens, stop_tokens=[stop])
    assert ids(emissions) == expected[:cut]
    assert emissions[-1].finish_reason == "stop"
    assert stats.emitted == cut
    assert list(engine.tokens) == (prompt + expected[:cut])[:-1]


@given(
    family=st.sampled_from(FAMILIES[:4]),
    setup=st.sampled_from(SETUPS),
    length=st.integers(1, 30),
    plan=plans(),
    taken=st.integers(1, 30),
)
def test_a_consumer_may_leave_after_any_token_and_the_state_goes_on_from_there(
    family, setup, length, plan, taken
):
    expected = plain(family, length, 0, 40)
    engine, prompt = engine_of(family, setup), prompt_of(length)
    drafter = PlannedDrafter(prompt + expected, plan, engine.vocab_size)
    decoder = SpeculativeDecoder(engine, drafter)
    emissions = decoder.generate(prompt, max_tokens=40)
    left = [next(emissions).token for _ in range(taken)]
    emissions.close()
    assert left == expected[:taken]
    assert decoder.stats.emitted == taken
    assert list(engine.tokens) == (prompt + left)[:-1]
    assert not engine.leased
    token = left[-1]
    for following in expected[taken:]:
        assert engine.verify([token]).argmax == [following]
        token = following


@given(
    family=st.sampled_from(FAMILIES),
    setup=st.sampled_from(SETUPS),
    length=st.integers(1, 40),
    plan=plans(),
)
def test_log_probabilities_equal_plain_decodings_bit_for_bit(family, setup, length, plan):
    model, prompt = model_of(family), prompt_of(length)
    reference = list(mlxspec.generate_step(prompt, model, max_tokens=12, engine=engine_of(family)))
    drafter = PlannedDrafter(prompt + [t for t, _, _ in reference], plan, 1000)
    steps = mlxspec.generate_step(
        prompt, model, max_tokens=12, drafter=drafter, engine=engine_of(family, setup)
    )
    for (token, logprobs, _), (expected, plain_logprobs, _) in zip(steps, reference, strict=True):
        assert token == expected
        assert mx.array_equal(logprobs, plain_logprobs)


def test_log_probabilities_are_mlx_lms():
    prompt = prompt_of(20)
    ours = mlxspec.generate_step(prompt, model_of("llama"), max_tokens=10, prompt_lookup=True)
    theirs = mlx_lm_generate_step(mx.array(prompt), model_of("llama"), max_tokens=10)
    for (token, logprobs, _), (expected, expected_logprobs) in zip(ours, theirs, strict=True):
        assert token == expected
        assert logprobs.shape == expected_logprobs.shape
        assert mx.array_equal(logprobs, expected_logprobs)


@pytest.mark.parametrize("k", range(1, 18))
def test_a_drafter_that_is_always_right_saves_every_forward_it_can(k):
    engine, prompt = engine_of("llama"), prompt_of(5)
    expected = plain("llama", 5, 0, N - 5)
    drafter = PlannedDrafter(prompt + expected, [("right", k)], engine.vocab_size)
    emissions, stats = run(engine, prompt, drafter, num_draft_tokens=k)
    assert ids(emissions) == expected
    assert stats.accepted == stats.drafted
    assert stats.acceptance_rate == 1.0
    assert stats.forwards_saved == stats.accepted


@pytest.mark.parametrize("k", range(1, 18))
def test_a_drafter_that_is_always_wrong_costs_no_forward(k):
    engine, prompt = engine_of("llama"), prompt_of(5)
    expected = plain("llama", 5, 0, N - 5)
    drafter = PlannedDrafter(prompt + expected, [("wrong", k)], engine.vocab_size)
    emissions, stats = run(engine, prompt, drafter, num_draft_tokens=k)
    assert ids(emissions) == expected
    assert stats.accepted == stats.forwards_saved == 0
    assert stats.forwards == len(expected)


def test_without_alignment_a_long_block_takes_two_forwards():
    engine, prompt = engine_of("llama", SETUPS[2]), prompt_of(3)
    expected = plain("llama", 3, 0, 8)
    drafter = PlannedDrafter(prompt + expected, [("right", 7)], engine.vocab_size)
    emissions, stats = run(
        engine, prompt, drafter, max_tokens=8, num_draft_tokens=7, align_proposals=False
    )
    assert ids(emissions) == expected
    assert (stats.rounds, stats.forwards, stats.accepted) == (1, 2, 7)


@given(family=st.sampled_from(FAMILIES[:4]), length=st.integers(1, 40), min_ngram=st.integers(1, 3))
def test_prompt_lookup_changes_no_token(family, length, min_ngram):
    prompt = [token % 5 + 1 for token in prompt_of(length)]
    lookup = PromptLookup(min_ngram=min_ngram)
    drafted, stats = run(engine_of(family), prompt, lookup)
    undrafted, _ = run(engine_of(family), prompt)
    assert ids(drafted) == ids(undrafted)
    assert stats.forwards == stats.rounds


@given(length=st.integers(1, 60), max_tokens=st.sampled_from([-1, 1, 7]))
def test_the_dynamic_engine_decodes_as_mlx_lm_and_says_that_it_does_not_speculate(
    length, max_tokens
):
    engine = _dynamic_engine()
    emissions, stats = run(engine, prompt_of(length), PromptLookup(1), max_tokens=max_tokens)
    expected = plain("llama", length, 0, N - length)
    assert ids(emissions) == (expected if max_tokens < 0 else expected[:max_tokens])
    assert stats.drafted == 0
    assert "dynamic engine" in stats.why_off
    assert "Speculation: off" in stats.summary()


@cache
def _dynamic_engine():
    return DynamicShapeEngine(model_of("llama"), max_context_length=N)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 7, 15, 17])
def test_every_kind_of_proposal_at_every_length_leaves_the_text_alone(kind, length):
    engine, prompt = engine_of("llama"), prompt_of(9)
    expected = plain("llama", 9, 0, N - 9)
    drafter = PlannedDrafter(prompt + expected, [(kind, length)], engine.vocab_size)
    emissions, _ = run(engine, prompt, drafter, num_draft_tokens=15)
    assert ids(emissions) == expected
