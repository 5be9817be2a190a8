"""Draft models: the text is plain decoding's, and the draft's own state is never in doubt."""

from __future__ import annotations

import math
import threading
from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec import (
    Chain,
    DeviceDraft,
    DrafterError,
    DraftModel,
    EngineBusy,
    PromptLookup,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
    UnsupportedModel,
    VocabularyMismatch,
)
from mlxspec.decoding import ModelsChoice, RejectionSampling, Sampling
from mlxspec.decoding.sampling import noise_key
from mlxspec.decoding.target import TargetChoice
from mlxspec.drafting.fitting import FittedScores
from mlxspec.engine import VerifyRows
from mlxspec.engine.support import model_from_config
from tests.cases import varied_model
from tests.conftest import PROFILE
from tests.constraints.vocabularies import PADDED_SIZE, VOCABULARIES
from tests.families.tiny import set_random_weights, tiny_configs, tiny_model
from tests.interruptions import Interruptions
from tests.scripted import ScriptedEngine

TARGETS = ("llama", "gemma3_text", "lfm2", "mamba2")
# What may draft: the target itself, others of its size and other weights, other layers, another
# width, a padded vocabulary or one cut short, a short context.
DRAFTS = ("itself", "llama", "gemma3_text", "lfm2", "mamba2", "narrow", "padded", "cut", "short")
N = 64
PROMPT = [5, 9, 2, 6]


@cache
def model_of(name):
    changes = {
        "narrow": {"hidden_size": 32, "intermediate_size": 48},
        "padded": {"vocab_size": 1088},
        "cut": {"vocab_size": 940},
    }.get(name)
    if changes is None:
        return tiny_model("llama" if name == "short" else name, seed=1)
    model = model_from_config(tiny_configs()["llama"] | changes)
    set_random_weights(model, seed=1)
    mx.eval(model.parameters())
    return model.eval()


@cache
def target_of(name):
    return StaticShapeEngine(tiny_model(name), max_context_length=N, span_step=16)


@cache
def draft_of(target, name, p_min=0.0):
    model = tiny_model_of(target) if name == "itself" else model_of(name)
    options = {"max_context_length": 24} if name == "short" else {}
    return DraftModel(model, p_min=p_min, **options)


def tiny_model_of(target):
    return target_of(target).model


def steps(target, prompt=PROMPT, **options):
    options = {"engine": target_of(target), "max_tokens": 24} | options
    return list(mlxspec.generate_step(prompt, tiny_model_of(target), **options))


def ids(triples):
    return [token for token, _, _ in triples]


samplings = st.sampled_from(
    [
        {},
        {"temp": 1.0},
        {"temp": 0.6, "top_p": 0.9, "min_p": 0.02},
        {"temp": 1.5, "top_k": 7},
        {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    ]
)


@given(
    target=st.sampled_from(TARGETS),
    name=st.sampled_from(DRAFTS),
    length=st.integers(1, 30),
    sampling=samplings,
    seed=st.integers(0, 2**64 - 1),
    k=st.integers(1, 17),
    p_min=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    chained=st.booleans(),
    align=st.booleans(),
    data=st.data(),
)
def test_no_draft_model_changes_a_token_or_a_log_probability(
    target, name, length, sampling, seed, k, p_min, chained, align, data
):
    prompt = [(7 * i + 3) % 9 + 1 for i in range(length)]
    options = sampling | ({"seed": seed} if sampling else {})
    plain = steps(target, prompt, **options)
    stop = data.draw(st.sampled_from([None, *ids(plain)]))
    stops = [] if stop is None else [stop]
    cut = len(plain) if stop is None else ids(plain).index(stop) + 1
    model = draft_of(target, name, p_min)
    drafter = Chain(PromptLookup(1), model) if chained else model
    stats = SpeculationStats()
    drafted = steps(
        target,
        prompt,
        drafter=drafter,
        num_draft_tokens=k,
        align_proposals=align,
        stop_tokens=stops,
        stats=stats,
        **options,
    )
    assert ids(drafted) == ids(plain)[:cut]
    for (_, ours, _), (_, theirs, _) in zip(drafted, plain, strict=False):
        assert mx.array_equal(ours, theirs)
    text = prompt + ids(drafted)
    assert list(target_of(target).tokens) == text[:-1]
    assert list(model.engine.tokens) == text[: model.engine.processed_token_count]
    assert model.engine.processed_token_count < len(text)


@given(
    target=st.sampled_from(TARGETS),
    name=st.sampled_from(DRAFTS[:-1]),
    k=st.integers(1, 9),
    temp=st.sampled_from([0.0, 0.8]),
    taken=st.integers(1, 24),
)
def test_after_every_round_the_draft_engine_covers_what_was_accepted_and_nothing_else(
    target, name, k, temp, taken
):
    """Of k drafts the last has not been processed; a consumer may leave after any token."""
    drafter, engine = draft_of(target, name), target_of(target)
    covered = []
    rounds = []

    class Watched:
        """The draft model, with its engine looked at after every round."""

        source = drafter.source
        forward_count = 0
        lease, begin, reset = drafter.lease, drafter.begin, drafter.reset
        require_vocabulary = drafter.require_vocabulary

        def propose(self, history, budget):
            draft = drafter.propose(history, budget)
            rounds.append((len(history), len(draft)))
            return draft

        def commit(self, length):
            drafter.commit(length)
            if rounds and len(covered) < len(rounds):
                covered.append((length, list(drafter.engine.tokens)))

    decoder = SpeculativeDecoder(
        engine,
        Watched(),
        SpeculativeDecodingOptions(k),
        acceptance=ModelsChoice(Sampling(temp)),
        seed=9,
    )
    emissions = decoder.generate(PROMPT, max_tokens=24)
    text = PROMPT + [next(emissions).token for _ in range(taken)]
    emissions.close()
    assert len(covered) == len(rounds) == decoder.stats.rounds
    for (before, drafted), (after, tokens) in zip(rounds, covered, strict=True):
        if not drafted:
            continue
        accepted = after - before - 1
        assert len(tokens) == before + min(accepted, drafted - 1)
        assert tokens == text[: len(tokens)]


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_a_model_that_drafts_for_itself_is_always_accepted(family, temp):
    model = tiny_model(family)
    options = {"max_tokens": 500, "max_context_length": 600} | (
        {"temp": temp, "seed": 4} if temp else {}
    )
    stats = SpeculationStats()
    plain = ids(mlxspec.generate_step(PROMPT, model, **options))
    drafted = mlxspec.generate_step(PROMPT, model, draft_model=model, stats=stats, **options)
    assert ids(drafted) == plain
    assert stats.emitted == 500
    assert stats.acceptance_rate == 1.0
    assert stats.tokens_per_forward > 7
    assert stats.draft_forwards >= stats.drafted


def test_padding_of_the_embeddings_does_not_part_the_noise():
    """Two models that differ in rows for no token alone agree on every sampled token."""
    small = tiny_model("llama")
    large = model_from_config(tiny_configs()["llama"] | {"vocab_size": 1088})
    large.load_weights(
        [(name, weight) for name, weight in _flat(small) if "embed_tokens" not in name],
        strict=False,
    )
    rows = small.model.embed_tokens.weight
    large.model.embed_tokens.weight = mx.concatenate([rows, 0 * rows[:88]])
    for target, draft in ((small, large), (large, small)):
        for options in ({"temp": 0.7, "seed": 2, "top_k": 20}, {}):
            stats = SpeculationStats()
            list(mlxspec.generate_step(PROMPT, target, draft_model=draft, stats=stats, **options))
            assert stats.drafted
            assert stats.acceptance_rate == 1.0


def _flat(model):
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def test_an_id_that_the_target_lacks_is_never_proposed():
    """The draft model's favourite ids lie past the target's vocabulary."""
    draft = model_from_config(
        tiny_configs()["llama"] | {"vocab_size": 1088, "tie_word_embeddings": False}
    )
    set_random_weights(draft, seed=2)
    draft.lm_head.weight[1000:] = 40 * draft.lm_head.weight[:88]
    free = StaticShapeEngine(draft, max_context_length=N)
    assert max(free.roll_out(PROMPT, 8).ids(8)) >= 1000
    for options in ({}, {"temp": 1.0, "seed": 1}, {"temp": 1.0, "seed": 1, "top_p": 0.5}):
        stats = SpeculationStats()
        drafted = steps("llama", drafter=DraftModel(draft), stats=stats, **options)
        assert ids(drafted) == ids(steps("llama", **options))
        assert stats.drafted


def test_a_draft_model_falls_silent_at_the_end_of_its_context_and_before_a_token_it_lacks():
    stats = SpeculationStats()
    short = draft_of("llama", "short")
    assert ids(steps("llama", drafter=short, stats=stats, max_tokens=50)) == ids(
        steps("llama", max_tokens=50)
    )
    assert stats.drafted
    assert short.engine.processed_token_count < 24
    assert short.propose(list(range(24)), 5) == []

    lacking = draft_of("llama", "cut")
    stats = SpeculationStats()
    prompt = [5, 950, 6]
    assert ids(steps("llama", prompt, drafter=lacking, stats=stats)) == ids(steps("llama", prompt))
    assert stats.drafted == 0
    assert stats.plain_rounds == stats.rounds


def test_doubtful_tokens_end_a_draft_and_only_confident_ones_are_proposed():
    model, history = model_of("llama"), [*PROMPT]
    sure = DraftModel(model)
    tokens = sure.propose(history, 12).tokens.tolist()
    probabilities = []
    engine = StaticShapeEngine(model, max_context_length=N)
    for token in [*history, *tokens]:
        rows = engine.verify([token], mlxspec.Capture(logits=True))
        probabilities.append(mx.softmax(rows.logits[0].astype(mx.float32)).max().item())
    probabilities = probabilities[len(history) - 1 : -1]
    for p_min in sorted(probabilities)[1:8]:
        p_min *= 1.0001
        # The last one that was asked for is proposed unasked.
        expected = next((i for i, p in enumerate(probabilities[:-1]) if p < p_min), 12)
        drafter = DraftModel(model, p_min=p_min)
        draft = drafter.propose(history, 12)
        assert len(draft) == expected
        if expected:
            assert draft.tokens.tolist() == tokens[:expected]
        assert list(drafter.engine.tokens) == history


def test_where_distributions_are_compared_no_draw_decides_whether_it_is_proposed():
    """Else a draft's tokens would have the draft model's distribution among the sure ones only."""
    model = model_of("llama")
    logits = model(mx.array([PROMPT]))[0, -1].astype(mx.float32)
    likeliest = mx.softmax(logits).max().item()
    for p_min, proposed in ((0.99 * likeliest, True), (1.01 * likeliest, False)):
        drafter, drawn = DraftModel(model, p_min=p_min), set()
        for seed in range(12):
            target = TargetChoice(1000, Sampling(1.5), noise_key(seed), compares_distributions=True)
            drafter.begin(PROMPT, target)
            draft = drafter.propose(PROMPT, 3)
            assert bool(len(draft)) == proposed
            drawn |= {*draft.tokens[:1].tolist()} if proposed else set()
        assert len(drawn) != 1


def test_one_wait_a_round_serves_drafts_and_rows(monkeypatch):
    """But for every 64th proposal, which is waited for to know what a forward takes."""
    drafter, engine = draft_of("llama", "narrow"), target_of("llama")
    waits = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.append(1) or evaluate(*arrays))
    monkeypatch.setattr("mlxspec.drafting.model._MEASURED_EVERY", 10**9)
    list(SpeculativeDecoder(engine, drafter).generate(PROMPT, max_tokens=12))
    decoder = SpeculativeDecoder(engine, drafter)
    emissions = decoder.generate(PROMPT, max_tokens=12)
    next(emissions)
    rounds = decoder.stats.rounds
    waits.clear()
    list(emissions)
    assert decoder.stats.drafted > rounds
    assert len(waits) == decoder.stats.rounds - rounds


def test_a_draft_model_says_what_it_has_yet_to_take_in():
    drafter = draft_of("llama", "itself")
    drafter.reset()
    drafter.propose(PROMPT, 3)
    drafter.commit(len(PROMPT))
    held, costs = drafter.engine.processed_token_count, drafter.engine.tile_costs
    tile = drafter.engine.verify_tile_width
    assert 0 < held <= len(PROMPT)
    assert drafter.seconds_behind(held) == drafter.seconds_behind(held + tile) == 0.0
    assert drafter.seconds_behind(held + tile + 1) > 0.0
    widest = costs.widths[-1]
    assert drafter.seconds_behind(held + 5 * widest) == pytest.approx(5 * costs.of(widest))


def test_seconds_are_counted_as_the_drafts_and_the_tiles():
    stats = SpeculationStats()
    steps("llama", drafter=draft_of("llama", "llama"), stats=stats, max_tokens=50)
    assert 0.2 < stats.seconds["draft"] / sum(stats.seconds.values()) < 1


def test_what_a_draft_takes_after_it_was_handed_over_is_not_counted_as_the_tiles():
    class Slow:
        def propose(self, history, budget):
            return DeviceDraft(mx.array([1] * budget), seconds=3600.0) if budget else []

        def commit(self, length):
            pass

        def reset(self):
            pass

    stats = SpeculationStats()
    steps("llama", drafter=Slow(), stats=stats)
    assert 0 < stats.plain_rounds < stats.rounds / 4
    assert 0 < stats.seconds["verify"] < stats.seconds["draft"]


@pytest.mark.parametrize("chained", [False, True])
def test_a_second_generation_traces_nothing_and_gives_the_same_text(chained):
    target, draft = tiny_model("llama"), tiny_model("qwen2")
    options = {"draft_model": draft, "prompt_lookup": chained, "max_context_length": N}
    texts, traces = [], []
    for _ in range(3):
        stats = SpeculationStats()
        texts.append(ids(mlxspec.generate_step(PROMPT, target, stats=stats, **options)))
        assert stats.drafted
        traces.append(
            [
                sum(engine.trace_count for _, engine in model.__dict__["_mlxspec_engines"])
                for model in (target, draft)
            ]
        )
    assert texts[0] == texts[1] == texts[2]
    assert traces[0] == traces[1] == traces[2]


def test_a_model_that_drafts_for_itself_finds_both_its_engines_again():
    model = tiny_model("llama", seed=5)
    counts = []
    for _ in range(3):
        list(mlxspec.generate_step(PROMPT, model, draft_model=model, max_tokens=20))
        counts.append([engine.trace_count for _, engine in model.__dict__["_mlxspec_engines"]])
    assert len(counts[0]) == 2
    assert sorted(counts[0]) == sorted(counts[1]) == sorted(counts[2])


def test_what_two_texts_share_is_not_fed_to_the_draft_model_again():
    prompt = [(3 * i) % 50 + 1 for i in range(40)]
    drafter = DraftModel(model_of("llama"))
    steps("llama", prompt, drafter=drafter, max_tokens=4)
    before = drafter.engine.prefill_forward_count
    steps("llama", [*prompt, 7], drafter=drafter, max_tokens=4)
    assert drafter.engine.prefill_forward_count - before <= 2


def test_generations_in_threads_or_interleaved_draft_with_engines_of_their_own():
    target, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    options = {"max_tokens": 16, "temp": 0.8, "max_context_length": N}
    alone = {s: ids(mlxspec.generate_step(PROMPT, target, seed=s, **options)) for s in (1, 2, 3)}
    running = {
        seed: mlxspec.generate_step(PROMPT, target, draft_model=draft, seed=seed, **options)
        for seed in alone
    }
    together = {seed: [] for seed in alone}
    for _ in range(16):
        for seed, generation in running.items():
            together[seed].append(next(generation)[0])
    for generation in running.values():
        generation.close()
    assert together == alone
    in_threads = {}

    def work(seed):
        generation = mlxspec.generate_step(PROMPT, target, draft_model=draft, seed=seed, **options)
        in_threads[seed] = ids(generation)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_threads == alone


def test_one_draft_model_object_serves_one_generation_at_a_time():
    drafter = DraftModel(model_of("llama"))
    first = SpeculativeDecoder(target_of("llama"), drafter).generate(PROMPT, max_tokens=6)
    other = StaticShapeEngine(tiny_model_of("llama"), max_context_length=N)
    with pytest.raises(EngineBusy, match="this DraftModel is generating for somebody else"):
        SpeculativeDecoder(other, drafter).generate(PROMPT, max_tokens=6)
    assert not other.leased
    first.close()
    assert not drafter.engine.leased
    assert list(SpeculativeDecoder(other, drafter).generate(PROMPT, max_tokens=6))


def test_without_speculation_no_draft_engine_is_made():
    draft = tiny_model("llama", seed=8)
    for options in ({"engine": "dynamic"}, {"num_draft_tokens": 0}):
        drafter = DraftModel(draft)
        target = tiny_model_of("llama")
        decoder_options = {"max_tokens": 3, "drafter": drafter} | options
        assert len(list(mlxspec.generate_step(PROMPT, target, **decoder_options))) == 3
        assert drafter.forward_count == 0


def test_an_engine_that_reads_drafts_on_the_host_takes_a_draft_models_too():
    drafter = DraftModel(model_of("llama"))
    script = [*PROMPT, *drafter.propose(PROMPT, 5).tokens.tolist(), 3, 4]
    engine = ScriptedEngine(script, 1000)
    decoder = SpeculativeDecoder(engine, drafter)
    tokens = [emission.token for emission in decoder.generate(PROMPT, max_tokens=7)]
    assert tokens == script[4:11]
    assert decoder.stats.accepted >= 5


INTERRUPTED = tuple(
    f"mlxspec/{name}"
    for name in (
        "drafting/model.py",
        "engine/static.py",
        "engine/reach.py",
        "engine/rollout.py",
        "engine/rows.py",
        "decoding/decoder.py",
    )
)
interruptions = partial(Interruptions, lambda file: file.endswith(INTERRUPTED))


def _take(triples, emitted):
    for token, _, _ in triples:
        emitted.append(token)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_ctrl_c_at_any_line_leaves_target_and_draft_right_for_the_next_turn(family):
    """The draft model is the target's, so that its engine would betray any token out of place."""
    drafter, engine = draft_of(family, "itself"), target_of(family)
    turn = {"drafter": drafter, "num_draft_tokens": 4, "max_tokens": 9}
    for _ in range(2):
        drafter.reset()
        engine.reset(0)
        with interruptions() as counted:
            steps(family, **turn)
    assert counted.lines > 500
    plain = ids(steps(family, max_tokens=24))
    following = {}
    step = 1 if PROFILE == "deep" else counted.lines // 40
    # A proposal now and then is waited for and measured, which moves the end by some lines.
    for line in range(7, counted.lines - 60, step):
        engine.reset(0)
        emitted = []
        with pytest.raises(KeyboardInterrupt), interruptions([line]):
            _take(mlxspec.generate_step(PROMPT, engine.model, engine=engine, **turn), emitted)
        assert emitted == plain[: len(emitted)]
        assert not drafter.engine.leased
        prompt = [*PROMPT, *emitted, 8, 3]
        if len(emitted) not in following:
            other = StaticShapeEngine(engine.model, max_context_length=N, span_step=16)
            following[len(emitted)] = ids(steps(family, prompt, engine=other, max_tokens=9))
        stats = SpeculationStats()
        drafted = steps(family, prompt, drafter=drafter, stats=stats, max_tokens=9)
        assert ids(drafted) == following[len(emitted)], line
        assert stats.acceptance_rate == 1.0, line


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 5}])
@pytest.mark.parametrize("chained", [False, True])
def test_under_a_grammar_a_draft_model_changes_no_token(options, chained):
    model = varied_model("llama", vocab_size=PADDED_SIZE)
    tokenizer = VOCABULARIES["byte-level"]()
    pattern = r"20[0-9]{2}-(0[1-9]|1[0-2])(, the cat sat)?"
    options = options | {"regex": pattern, "max_tokens": 60, "max_context_length": 128}
    plain = [r.token for r in mlxspec.stream_generate(model, tokenizer, PROMPT, **options)]
    stats = SpeculationStats()
    responses = mlxspec.stream_generate(
        model, tokenizer, PROMPT, draft_model=model, prompt_lookup=chained, stats=stats, **options
    )
    assert [r.token for r in responses] == plain
    assert stats.draft_forwards


def test_turns_of_one_engine_go_on_in_the_draft_model_too():
    drafter, engine = DraftModel(model_of("lfm2")), target_of("lfm2")
    prompt, fed = [(3 * i) % 50 + 1 for i in range(30)], []
    for _ in range(3):
        plain_engine = StaticShapeEngine(engine.model, max_context_length=N, span_step=16)
        expected = ids(steps("lfm2", prompt, engine=plain_engine, max_tokens=6))
        before = drafter.engine.prefill_forward_count
        assert ids(steps("lfm2", prompt, drafter=drafter, max_tokens=6)) == expected
        fed.append(drafter.engine.prefill_forward_count - before)
        prompt = [*prompt, *expected, 9]
    assert fed[0] >= 3
    assert max(fed[1:]) <= 2


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (mx.array([5, 1000]), "drafter Devices: .*token id 1000 at index 1"),
        (mx.array([-1]), "drafter Devices: .*token id -1"),
        (mx.array([[5]]), r"drafter Devices: expected tokens int32 \[k\]"),
        (mx.array([0.5]), r"drafter Devices: expected tokens int32 \[k\]"),
    ],
)
@pytest.mark.parametrize("scripted", [False, True])
def test_nonsense_on_the_device_is_refused_and_its_drafter_named(tokens, message, scripted):
    class Devices:
        def propose(self, history, budget):
            return DeviceDraft(tokens)

        def commit(self, length):
            pass

        def reset(self):
            pass

    engine = ScriptedEngine([*PROMPT, 1, 2, 3], 1000) if scripted else target_of("llama")
    emissions = SpeculativeDecoder(engine, Devices()).generate(PROMPT, max_tokens=5)
    with pytest.raises(DrafterError, match=message):
        next(emissions)
    assert list(engine.tokens) == PROMPT[:-1]


@pytest.mark.filterwarnings("ignore:without effect")
@given(
    name=st.sampled_from(["itself", "llama", "cut"]),
    temp=st.sampled_from([0.0, 0.8]),
    own_sampler=st.booleans(),
)
@settings(max_examples=8)
def test_processors_and_samplers_of_a_caller_never_see_a_draft(name, temp, own_sampler):
    seen = []

    def bias(tokens, logits):
        seen.append(len(tokens))
        return logits + (mx.arange(1000) % 7 == tokens[-1] % 7) * 3.0

    options = {"logits_processors": [bias]}
    if own_sampler:
        options["sampler"] = lambda logprobs: mx.argmax(logprobs, axis=-1)
    elif temp:
        options |= {"temp": temp, "seed": 3}
    plain = ids(steps("llama", **options))
    once = list(seen)
    seen.clear()
    assert ids(steps("llama", drafter=draft_of("llama", name), **options)) == plain
    assert seen == once


def test_a_draft_model_is_checked_before_anything_is_generated():
    with pytest.raises(ValueError, match=r"p_min: expected a number from 0 to 1"):
        DraftModel(model_of("llama"), p_min=1.5)
    with pytest.raises(ValueError, match="expected a model of mlx-lm"):
        DraftModel("smollm2")
    with pytest.raises(ValueError, match="draft_model and drafter"):
        steps("llama", drafter=PromptLookup(), draft_model=model_of("llama"))
    with pytest.raises(UnsupportedModel, match="deepseek_v3"):
        DraftModel(model_from_config(tiny_deepseek()))
    large = model_from_config(tiny_configs()["llama"] | {"vocab_size": 3000})
    mx.eval(large.parameters())
    engine = target_of("llama")
    before = list(engine.tokens)
    with pytest.raises(VocabularyMismatch, match="vocabulary of 1000 ids, got one of 3000"):
        mlxspec.generate_step(PROMPT, engine.model, engine=engine, draft_model=large)
    assert list(engine.tokens) == before


def tiny_deepseek():
    return {
        "model_type": "deepseek_v3",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 8,
    }


def test_rejection_with_a_model_that_drafts_for_itself_accepts_nearly_everything():
    """p and q are the same rows in the same dtype, so that p / q is 1 and no draw exceeds it."""
    options = {"temp": 1.0, "acceptance": "rejection", "seed": 6, "max_tokens": 50}
    stats = SpeculationStats()
    drafted = ids(steps("llama", drafter=draft_of("llama", "itself"), stats=stats, **options))
    assert stats.acceptance_rate == 1.0
    assert drafted == ids(steps("llama", **options))


@pytest.mark.parametrize("name", ["llama", "cut", "padded", "lfm2"])
def test_rejection_with_a_draft_model_is_reproducible_by_seed(name):
    options = {"temp": 1.0, "top_p": 0.9, "acceptance": "rejection"}
    texts = []
    for seed in (8, 8, 9):
        stats = SpeculationStats()
        drafter = draft_of("llama", name)
        texts.append(ids(steps("llama", drafter=drafter, stats=stats, seed=seed, **options)))
        assert stats.drafted
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=4)]
)
def test_rejection_has_the_models_distribution_whatever_distribution_drafts(sampling):
    """Chi-square of the first token over positions; drafts drawn as a draft model draws them."""
    p_logits = mx.array([[0.1, 2.0, -1.0, 1.2, 0.7, -3.0, 1.9, 0.0]])
    q_logits = mx.array([[1.0, 0.3, -0.5, 2.0, 0.7, 1.0, -3.0, 0.4, 5.0]])  # one id too many
    rows = VerifyRows([0, 0], [0, 0], 1, logits=mx.concatenate([p_logits, p_logits]))
    count, key = 2000, noise_key(3)
    rule, scores = RejectionSampling(sampling, key), FittedScores(sampling, 8)
    positions = mx.arange(count)
    drafts = mx.argmax(scores(mx.broadcast_to(q_logits, (count, 9)), positions, key), axis=-1)
    drawn_from = sampling.tempered(scores.fitted(q_logits), positions[:1], key)
    first, accepted = np.zeros(8), 0
    for position, draft in enumerate(drafts.tolist()):
        assert draft < 8
        choices = [c.token for c in rule.choices(rows, [draft], position, drawn_from)]
        first[choices[0]] += 1
        accepted += len(choices) == 2
    p = _probabilities(sampling.tempered(p_logits, positions[:1], key))
    q = _probabilities(drawn_from)
    expected = count * p
    kept = expected > 0
    assert not first[~kept].any()
    chi_square = float(((first[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi_square < _limit(int(kept.sum()) - 1)
    overlap = float(np.minimum(p, q).sum())
    assert abs(accepted / count - overlap) < 4 * math.sqrt(0.25 / count)


def test_rejection_over_seeds_gives_the_distribution_of_plain_sampling_in_a_whole_round():
    """The second and third token of a generation with a draft model, over seeds."""
    sampling = {"temp": 1.0, "top_k": 3}
    drafter, engine = draft_of("llama", "llama"), target_of("llama")
    seen: dict[tuple[int, ...], int] = {}
    count = 250
    for seed in range(count):
        options = {"acceptance": "rejection", "seed": seed, "max_tokens": 2} | sampling
        text = tuple(ids(steps("llama", drafter=drafter, **options)))
        seen[text] = seen.get(text, 0) + 1
    expected = {}
    rule, key = Sampling(**sampling), noise_key(0)
    engine.reset(0)
    rows = engine.verify(PROMPT, mlxspec.Capture(logits=True)).logits[-1:]
    for first, p in enumerate(_probabilities(rule.tempered(rows, mx.array([4]), key))):
        if not p:
            continue
        engine.reset(4)
        rows = engine.verify([first], mlxspec.Capture(logits=True)).logits
        for second, q in enumerate(_probabilities(rule.tempered(rows, mx.array([5]), key))):
            if q:
                expected[first, second] = count * p * q
    assert seen.keys() <= expected.keys()
    frequent = {pair: n for pair, n in expected.items() if n >= 5}
    chi_square = sum((seen.get(pair, 0) - n) ** 2 / n for pair, n in frequent.items())
    assert chi_square < _limit(len(frequent) - 1)


def _probabilities(scaled):
    return np.array(mx.softmax(scaled, axis=-1))[0].astype(np.float64)


def _limit(degrees):
    """The 0.9999 quantile of chi-square (Wilson, Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
