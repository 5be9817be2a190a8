"""Seeded sampling: one seed, one text, whatever is drafted; and the right distribution."""

from __future__ import annotations

import math
import threading
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlxspec
from mlxspec import SpeculationStats, StaticShapeEngine
from mlxspec.decoding import RejectionSampling, Sampling
from mlxspec.decoding.sampling import Purpose, noise_key, row_keys, uniform
from mlxspec.engine import VerifyRows
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter, plans

FAMILIES = ("llama", "qwen3", "gemma3_text", "lfm2", "mamba2")
N = 64


@cache
def model_of(family):
    return tiny_model(family)


@cache
def engine_of(family, width=None):
    widths = None if width is None else (width,)
    return StaticShapeEngine(
        model_of(family), max_context_length=N, tile_widths=widths, span_step=16
    )


def steps(family, prompt, *, width=None, **options):
    options = {"engine": engine_of(family, width), "max_tokens": 24} | options
    return list(mlxspec.generate_step(prompt, model_of(family), **options))


def ids(triples):
    return [token for token, _, _ in triples]


samplings = st.fixed_dictionaries(
    {"temp": st.sampled_from([0.0, 0.3, 1.0, 2.0])},
    optional={
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "top_k": st.sampled_from([1, 5, 50]),
        "xtc_probability": st.sampled_from([0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.05, 0.2]),
    },
)


@pytest.mark.filterwarnings("ignore:without effect")
@given(
    family=st.sampled_from(FAMILIES),
    length=st.integers(1, 20),
    plan=plans(),
    seed=st.integers(0, 2**64 - 1),
    sampling=samplings,
)
def test_no_drafter_changes_a_token_or_a_log_probability_of_a_seed(
    family, length, plan, seed, sampling
):
    prompt = [(7 * i + 3) % 90 + 1 for i in range(length)]
    plain = steps(family, prompt, seed=seed, **sampling)
    drafter = PlannedDrafter(prompt + ids(plain), plan, 1000)
    drafted = steps(family, prompt, seed=seed, drafter=drafter, num_draft_tokens=12, **sampling)
    assert ids(drafted) == ids(plain)
    for (_, ours, _), (_, theirs, _) in zip(drafted, plain, strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_that_a_model_would_make_for_itself_are_always_accepted(family, temp):
    prompt = [5, 9, 2, 6]
    options = {"temp": temp} | ({"seed": 11} if temp else {})
    plain = ids(steps(family, prompt, max_tokens=50, **options))
    stats = SpeculationStats()
    drafter = PlannedDrafter(prompt + plain, [("right", 7)], 1000)
    assert (
        ids(steps(family, prompt, max_tokens=50, drafter=drafter, stats=stats, **options)) == plain
    )
    assert stats.drafted
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("width", [1, 2, 5, 8, 16])
def test_a_seed_gives_the_same_text_in_every_width(width):
    prompt = [5, 9, 2, 6]
    assert ids(steps("llama", prompt, width=width, temp=1.0, seed=3)) == ids(
        steps("llama", prompt, temp=1.0, seed=3)
    )


def test_seeds_differ_and_repeat_and_a_drawn_seed_is_told():
    prompt = [5, 9, 2, 6]
    texts = {seed: ids(steps("llama", prompt, temp=1.0, seed=seed)) for seed in range(8)}
    assert len({tuple(text) for text in texts.values()}) == 8
    assert ids(steps("llama", prompt, temp=1.0, seed=5)) == texts[5]
    high = ids(steps("llama", prompt, temp=1.0, seed=5 + 2**63))
    assert high != texts[5]
    stats = SpeculationStats()
    drawn = ids(steps("llama", prompt, temp=1.0, stats=stats))
    assert f"Seed: {stats.seed}" in stats.summary()
    assert ids(steps("llama", prompt, temp=1.0, seed=stats.seed)) == drawn


def test_the_global_generator_is_neither_read_nor_moved():
    mx.random.seed(4)
    before = [mx.array(key).tolist() for key in mx.random.state]
    first = ids(steps("llama", [5, 9], temp=1.0, seed=1, xtc_probability=0.5))
    assert [key.tolist() for key in mx.random.state] == before
    mx.random.seed(5)
    assert ids(steps("llama", [5, 9], temp=1.0, seed=1, xtc_probability=0.5)) == first


def test_requests_interleaved_or_in_threads_give_the_text_each_gives_alone():
    prompt, model = [5, 9, 2, 6], model_of("llama")
    options = {"temp": 0.8, "max_tokens": 12}
    alone = {seed: ids(steps("llama", prompt, seed=seed, **options)) for seed in (1, 2, 3)}
    running = {
        seed: mlxspec.generate_step(prompt, model, seed=seed, prompt_lookup=True, **options)
        for seed in alone
    }
    together: dict[int, list[int]] = {seed: [] for seed in alone}
    for _ in range(12):
        for seed, generation in running.items():
            together[seed].append(next(generation)[0])
    assert together == alone

    in_threads: dict[int, list[int]] = {}

    def work(seed):
        generation = mlxspec.generate_step(prompt, model, seed=seed, prompt_lookup=True, **options)
        in_threads[seed] = [token for token, _, _ in generation]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_threads == alone


def test_draws_of_other_positions_purposes_and_seeds_have_other_keys():
    positions = mx.arange(2000)
    keys = [
        tuple(key)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for purpose in Purpose
        for key in row_keys(noise_key(seed), positions, purpose).tolist()
    ]
    assert len(set(keys)) == len(keys) == 4 * len(Purpose) * 2000


def test_uniform_draws_are_uniform_and_independent_of_the_batch():
    key, positions = noise_key(7), mx.arange(20_000)
    draws = np.array(uniform(key, positions, Purpose.ACCEPT))
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert _chi_square(counts, np.full(20, 1000.0)) < _limit(19)
    one = uniform(key, positions[777:778], Purpose.ACCEPT)
    assert one.item() == draws[777]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_p=0.8),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, top_k=3),
        Sampling(1.5, top_p=0.9, min_p=0.05, top_k=6),
    ],
)
def test_coupled_draws_have_the_filtered_tempered_distribution(sampling):
    """Chi-square against the exact distribution, over seeds and positions."""
    logits = mx.array([[0.1, 2.0, -1.0, 1.2, 0.7, -3.0, 1.9, 0.0]])
    count, seeds = 4000, 5
    expected = count * seeds * _exact(logits, sampling)
    counts = np.zeros(8)
    for seed in range(seeds):
        rows = mx.broadcast_to(logits, (count, 8))
        tokens = mx.argmax(sampling(rows, mx.arange(count), noise_key(seed)), axis=-1)
        counts += np.bincount(np.array(tokens), minlength=8)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert _chi_square(counts[kept], expected[kept]) < _limit(int(kept.sum()) - 1)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9)])
@pytest.mark.parametrize("drafted", [1, 5, 4])
def test_rejection_has_the_models_distribution_whatever_is_drafted(sampling, drafted):
    """The first token of a block after a likely, an unlikely and a middling draft."""
    logits = mx.array([[0.1, 2.0, -1.0, 1.2, 0.7, -3.0, 1.9, 0.0]])
    rows = VerifyRows([0, 0], [0, 0], 1, logits=mx.concatenate([logits, logits]))
    count = 4000
    rule = RejectionSampling(sampling, noise_key(3))
    first = np.zeros(8)
    accepted = 0
    for position in range(count):
        choices = [choice.token for choice in rule.choices(rows, [drafted], position)]
        first[choices[0]] += 1
        accepted += len(choices) == 2
        assert (choices[0] == drafted) == (len(choices) == 2)
    exact = _exact(logits, sampling)
    expected = count * exact
    kept = expected > 0
    assert not first[~kept].any()
    assert _chi_square(first[kept], expected[kept]) < _limit(int(kept.sum()) - 1)
    assert abs(accepted / count - exact[drafted]) < 4 * math.sqrt(0.25 / count)


def test_rejection_is_reproducible_by_seed_and_plain_without_drafts():
    prompt = [5, 9, 2, 6, 5, 9, 2, 6]
    options = {"temp": 1.0, "acceptance": "rejection"}
    once = ids(steps("llama", prompt, seed=8, prompt_lookup=True, **options))
    assert ids(steps("llama", prompt, seed=8, prompt_lookup=True, **options)) == once
    assert ids(steps("llama", prompt, seed=8, **options)) == ids(
        steps("llama", prompt, seed=8, temp=1.0)
    )


processors = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1.3, 0.8]),
        "presence_penalty": st.just(0.7),
        "frequency_penalty": st.just(0.4),
        "logit_bias": st.just({3: 5.0, 7: -50.0}),
    },
)


@pytest.mark.filterwarnings("ignore:without effect")
@given(
    family=st.sampled_from(FAMILIES[:3]),
    plan=plans(),
    made=processors,
    temp=st.sampled_from([0.0, 0.8]),
    own_sampler=st.booleans(),
)
def test_processors_and_samplers_of_a_caller_give_mlx_lms_own_tokens(
    family, plan, made, temp, own_sampler
):
    prompt = [(7 * i + 3) % 90 + 1 for i in range(12)]
    chain = make_logits_processors(**made)
    if not own_sampler and temp:
        reference = ids(steps(family, prompt, temp=temp, seed=9, logits_processors=chain))
        options = {"temp": temp, "seed": 9}
    else:
        sampler = make_sampler(temp)
        mx.random.seed(31)
        generation = mlx_lm_generate_step(
            mx.array(prompt),
            model_of(family),
            max_tokens=24,
            sampler=sampler,
            logits_processors=chain,
        )
        reference = [int(token) for token, _ in generation]
        options = {"sampler": sampler} if own_sampler else {}
    mx.random.seed(31)
    drafter = PlannedDrafter(prompt + reference, plan, 1000)
    drafted = steps(
        family, prompt, drafter=drafter, num_draft_tokens=12, logits_processors=chain, **options
    )
    assert ids(drafted) == reference


def test_a_processor_runs_once_per_emitted_token_on_the_history_it_would_see_in_mlx_lm():
    prompt = [5, 9, 2, 6]
    plain = ids(steps("llama", prompt))
    for plan in ([("right then wrong", 6)], [("wrong", 4)], [("right", 7)], [("empty", 0)]):
        seen = []

        def record(tokens, logits, seen=seen):
            assert logits.shape == (1, 1000)
            seen.append(tokens.tolist())
            return logits

        drafter = PlannedDrafter(prompt + plain, plan, 1000)
        assert ids(steps("llama", prompt, drafter=drafter, logits_processors=[record])) == plain
        assert seen == [prompt + plain[:count] for count in range(24)]


def test_a_processor_is_not_called_for_a_token_that_nobody_asked_for():
    prompt = [5, 9, 2, 6]
    plain = ids(steps("llama", prompt))
    calls = []

    def count(tokens, logits):
        calls.append(len(tokens))
        return logits

    drafter = PlannedDrafter(prompt + plain, [("right", 7)], 1000)
    generation = mlxspec.generate_step(
        prompt, model_of("llama"), drafter=drafter, engine=engine_of("llama"),
        logits_processors=[count],
    )  # fmt: skip
    for _ in range(3):
        next(generation)
    generation.close()
    assert len(calls) == 3
    assert list(engine_of("llama").tokens) == prompt + plain[:2]


def test_a_toy_grammar_as_a_processor_holds_with_and_without_drafts():
    """Only even ids after odd ones and odd ids after even ones."""

    def alternate(tokens, logits):
        parity = (mx.arange(1000) + tokens[-1] + 1) % 2 == 0
        return mx.where(parity[None], logits, -mx.inf)

    prompt = [5, 8, 5, 8, 5, 8]
    for sampling in ({}, {"temp": 1.0, "seed": 2}):
        plain = ids(steps("llama", prompt, logits_processors=[alternate], **sampling))
        assert all((a + b) % 2 == 1 for a, b in zip([8, *plain], plain, strict=False))
        stats = SpeculationStats()
        drafter = PlannedDrafter(prompt + plain, [("right", 5), ("wrong", 3)], 1000)
        drafted = steps(
            "llama",
            prompt,
            logits_processors=[alternate],
            drafter=drafter,
            num_draft_tokens=7,
            stats=stats,
            **sampling,
        )
        assert ids(drafted) == plain
        assert stats.accepted


def _exact(logits, sampling):
    scaled = sampling.tempered(logits, mx.array([0]), noise_key(0))
    return np.array(mx.softmax(scaled, axis=-1))[0].astype(np.float64)


def _chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(degrees):
    """The 0.9999 quantile of chi-square (Wilson, Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
