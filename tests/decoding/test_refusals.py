"""What a decoder refuses, and that refusing costs nothing that was there."""

from __future__ import annotations

import copy
import threading
import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxspec
from mlxspec import (
    DrafterError,
    EngineBusy,
    NonFiniteLogits,
    PromptLookup,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
    UnsupportedModel,
)
from mlxspec.drafting import DeviceDraft
from tests.families.tiny import tiny_model

N = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def engine(model):
    return StaticShapeEngine(model, max_context_length=N, span_step=16)


class Proposes:
    """A drafter that always proposes one thing."""

    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, history, budget):
        if isinstance(self.proposal, Exception):
            raise self.proposal
        return self.proposal

    def commit(self, length):
        pass

    def reset(self):
        pass


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "at least one token"),
        (list(range(N)), 5, "no room for an answer"),
        (list(range(N + 9)), 5, "no room for an answer"),
        ([1, 1000], 5, "token id 1000 at index 1 is outside"),
        ([-1], 5, "outside the model's vocabulary of 1000"),
        ("hello", 5, "expected token ids, got text"),
        ([1.5], 5, "expected integers"),
        (mx.array([[1, 2]]), 5, r"shape \(1, 2\)"),
        ([1], 0, "max_tokens: 0"),
        ([1], -2, "max_tokens: expected a positive number"),
        ([1], 2.5, "max_tokens: expected a positive number"),
    ],
)
def test_bad_input_is_refused_at_the_call_and_the_engine_is_unchanged(
    engine, prompt, max_tokens, message
):
    engine.prefill([3, 4, 5])
    with pytest.raises((ValueError, TypeError), match=message):
        SpeculativeDecoder(engine).generate(prompt, max_tokens=max_tokens)
    assert list(engine.tokens) == [3, 4, 5]


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), mx.array([3, 4]), np.array([3, 4])])
def test_a_prompt_may_be_any_flat_sequence_of_ids(engine, prompt):
    emissions = SpeculativeDecoder(engine).generate(prompt, max_tokens=2)
    assert len(list(emissions)) == 2
    assert list(engine.tokens)[:2] == [3, 4]


def test_the_last_position_of_the_context_is_emitted_and_never_processed(engine):
    prompt = list(range(1, N))
    emissions = list(SpeculativeDecoder(engine).generate(prompt, max_tokens=-1))
    assert len(emissions) == 1
    assert emissions[0].finish_reason == "length"
    assert engine.processed_token_count == N - 1
    assert engine.max_verify_block_length == 0
    assert engine.one_forward_draft_budget == 0


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([1000], "drafter Proposes: token id 1000"),
        ([5, -1], "drafter Proposes: token id -1"),
        ([2**40], "drafter Proposes: token id"),
        (["a"], "drafter Proposes: expected integers"),
        ([1.0], "drafter Proposes: expected integers"),
        (None, "drafter Proposes"),
        (7, "drafter Proposes"),
        ({"a": 1}, "drafter Proposes"),
        ("text", "drafter Proposes"),
    ],
)
def test_a_drafter_that_proposes_nonsense_is_named(engine, proposal, message):
    options = SpeculativeDecodingOptions(num_draft_tokens=7)
    emissions = SpeculativeDecoder(engine, Proposes(proposal), options).generate([1, 2, 3])
    with pytest.raises(DrafterError, match=message):
        next(emissions)
    assert list(engine.tokens) == [1, 2]
    assert not engine.leased


def test_nonsense_past_the_budget_is_cut_and_never_looked_at(engine):
    drafter = Proposes([1, 2, 3, None])
    options = SpeculativeDecodingOptions(num_draft_tokens=3)
    emissions = SpeculativeDecoder(engine, drafter, options).generate([1, 2], max_tokens=9)
    plain = SpeculativeDecoder(engine)
    tokens = [emission.token for emission in emissions]
    assert tokens == [emission.token for emission in plain.generate([1, 2], max_tokens=9)]


def test_arrays_of_ids_are_proposals(engine):
    for proposal in (np.array([1, 2]), mx.array([1, 2]), (1, 2)):
        emissions = SpeculativeDecoder(engine, Proposes(proposal)).generate([1, 2], max_tokens=4)
        assert len(list(emissions)) == 4


def test_an_exception_of_a_drafter_comes_through_and_frees_the_engine(engine):
    emissions = SpeculativeDecoder(engine, Proposes(KeyError("mine"))).generate([1, 2, 3])
    with pytest.raises(KeyError, match="mine"):
        next(emissions)
    assert not engine.leased
    assert list(engine.tokens) == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens"),
        ({"num_draft_tokens": True}, "num_draft_tokens"),
        ({"align_proposals": 1}, "align_proposals"),
    ],
)
def test_options_are_checked_when_they_are_made(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecodingOptions(**options)


def test_an_engine_in_use_refuses_a_second_generation_and_goes_on_with_the_first(engine):
    first = SpeculativeDecoder(engine).generate([1, 2, 3], max_tokens=6)
    with pytest.raises(EngineBusy, match="somebody else"):
        SpeculativeDecoder(engine).generate([4, 5], max_tokens=6)
    tokens = [next(first).token]
    tokens += [emission.token for emission in first]
    alone = SpeculativeDecoder(engine).generate([1, 2, 3], max_tokens=6)
    assert tokens == [emission.token for emission in alone]


def test_a_generation_forgotten_before_its_first_token_frees_the_engine(engine, model):
    SpeculativeDecoder(engine).generate([1, 2, 3])
    assert not engine.leased
    mlxspec.generate_step([1, 2, 3], model, engine=engine)
    assert not engine.leased
    steps = mlxspec.generate_step([1, 2, 3], model, engine=engine)
    assert engine.leased
    steps.close()
    del steps
    assert not engine.leased


def test_an_engine_moved_between_two_tokens_is_noticed(engine):
    emissions = SpeculativeDecoder(engine).generate([1, 2, 3], max_tokens=6)
    next(emissions)
    engine.verify([9])
    with pytest.raises(EngineBusy, match="between two tokens"):
        next(emissions)


def test_an_engine_used_and_put_back_between_two_tokens_is_noticed_too(engine):
    emissions = SpeculativeDecoder(engine).generate([1, 2, 3], max_tokens=6)
    next(emissions)
    count = engine.processed_token_count
    engine.reset(0)
    engine.prefill([9] * count)
    with pytest.raises(EngineBusy, match="between two tokens"):
        next(emissions)


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "seed": 3}])
def test_a_generation_may_go_on_in_another_thread_than_it_began_in(model, options):
    expected = [t for t, _, _ in mlxspec.generate_step([1, 2], model, max_tokens=8, **options)]
    steps = mlxspec.generate_step([1, 2], model, max_tokens=8, prompt_lookup=True, **options)
    found = []
    thread = threading.Thread(target=lambda: found.extend(token for token, _, _ in steps))
    thread.start()
    thread.join()
    assert found == expected


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("problem", [ValueError("mine"), KeyboardInterrupt()])
def test_what_went_wrong_in_a_processor_is_what_is_raised(family, problem):
    def fails(tokens, logits):
        raise problem

    steps = mlxspec.generate_step(
        [1, 2, 3], tiny_model(family), engine="dynamic", logits_processors=[fails]
    )
    with pytest.raises(type(problem)):
        next(steps)


def test_a_dynamic_forward_that_fails_leaves_no_half_of_itself(model, monkeypatch):
    engine, fresh = (mlxspec.DynamicShapeEngine(model, max_context_length=N) for _ in range(2))
    engine.prefill([1, 2, 3])

    def fails(*arguments, **keywords):
        raise RuntimeError("no scores")

    with pytest.raises(RuntimeError, match="no scores"):
        engine.verify([4], mlxspec.Capture(scores=fails))
    assert engine.processed_token_count == 0
    engine.prefill([1, 2, 3])
    with monkeypatch.context() as broken:
        broken.setattr(type(model), "__call__", fails)
        with pytest.raises(RuntimeError, match="no scores"):
            engine.prefill([4, 5, 6])
    assert engine.processed_token_count == 0
    for e in (engine, fresh):
        e.prefill([1, 2, 3])
    assert engine.verify([6]).argmax == fresh.verify([6]).argmax


def test_a_dynamic_rewind_that_mlx_lm_only_pretends_to_make_is_refused():
    """llama4's chunked caches have dropped their oldest keys, and say that they can be trimmed."""
    engine = mlxspec.DynamicShapeEngine(tiny_model("llama4"), max_context_length=64)
    engine.prefill(list(range(1, 30)))
    assert not engine.allows_rewind(10)
    with pytest.raises(mlxspec.RewindRefused):
        engine.reset(10)
    assert engine.processed_token_count == 29
    engine.reset(0)


def test_a_copy_of_a_model_is_another_model_and_can_be_made_after_generating(model):
    first = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)]
    other = tiny_model("llama", seed=5)
    twin = copy.copy(model)
    twin["model"] = other.model
    expected = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], other, max_tokens=8)]
    assert [t for t, _, _ in mlxspec.generate_step([1, 2, 3], twin, max_tokens=8)] == expected
    deep = copy.deepcopy(model)
    assert [t for t, _, _ in mlxspec.generate_step([1, 2, 3], deep, max_tokens=8)] == first


def test_engines_can_be_let_go_of_after_weights_changed_in_place():
    model = tiny_model("llama")
    before = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)]
    model.model.embed_tokens.weight *= -1
    mlxspec.forget_engines(model)
    assert [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)] != before


@pytest.mark.parametrize("kind", [list, tuple, set, np.array, mx.array])
def test_stop_tokens_may_be_any_collection_of_ids(model, kind):
    plain = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)]
    stop = plain[3]
    steps = mlxspec.generate_step([1, 2, 3], model, max_tokens=8, stop_tokens=kind([stop]))
    assert [t for t, _, _ in steps] == plain[: plain.index(stop) + 1]


def test_numbers_of_numpy_and_mlx_are_numbers(model):
    options = {"seed": np.int64(4), "temp": np.float32(0.5), "max_tokens": np.int64(3)}
    steps = [t for t, _, _ in mlxspec.generate_step([1, 2], model, **options)]
    options = {"seed": 4, "temp": 0.5, "max_tokens": 3}
    assert steps == [t for t, _, _ in mlxspec.generate_step([1, 2], model, **options)]
    with_array = mlxspec.generate_step([1, 2], model, temp=mx.array(0.5), seed=4, max_tokens=3)
    assert [t for t, _, _ in with_array] == steps


def test_a_callers_sampler_may_return_a_plain_number(model):
    plain = [t for t, _, _ in mlxspec.generate_step([1, 2], model, max_tokens=5)]
    sampled = mlxspec.generate_step(
        [1, 2], model, max_tokens=5, sampler=lambda row: int(mx.argmax(row).item())
    )
    assert [t for t, _, _ in sampled] == plain


def test_interleaved_generations_of_one_model_get_engines_of_their_own(model):
    prompts = ([1, 2, 3], [9, 8], [4, 4, 4, 4])
    alone = [[t for t, _, _ in mlxspec.generate_step(p, model, max_tokens=12)] for p in prompts]
    steps = [mlxspec.generate_step(p, model, max_tokens=12, prompt_lookup=True) for p in prompts]
    together = list(zip(*(((t for t, _, _ in s)) for s in steps), strict=True))
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_generations_in_threads_give_what_each_gives_alone(model):
    prompts = ([1, 2, 3], [9, 8], [4, 4, 4, 4])
    alone = [[t for t, _, _ in mlxspec.generate_step(p, model, max_tokens=12)] for p in prompts]
    results: dict[int, list[int]] = {}

    def work(index):
        steps = mlxspec.generate_step(prompts[index], model, max_tokens=12, prompt_lookup=True)
        results[index] = [token for token, _, _ in steps]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(3)] == alone


def test_a_second_generation_traces_nothing(model):
    stats = [SpeculationStats(), SpeculationStats()]
    for counters in stats:
        list(
            mlxspec.generate_step([1, 2, 3], model, max_tokens=30, stats=counters, engine="static")
        )
    assert stats[1].traces == 0


def test_changed_weights_get_a_new_engine():
    model = tiny_model("llama")
    before = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)]
    model.update(tiny_model("llama", seed=5).parameters())
    after = [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8)]
    fresh = [
        t for t, _, _ in mlxspec.generate_step([1, 2, 3], tiny_model("llama", seed=5), max_tokens=8)
    ]
    assert after == fresh != before


def test_a_row_without_a_number_is_refused_by_position_and_version():
    model = tiny_model("llama", seed=3)
    model.model.embed_tokens.weight[2] = mx.nan
    engine = StaticShapeEngine(model, max_context_length=N)
    emissions = SpeculativeDecoder(engine).generate([1, 5, 2])
    with pytest.raises(NonFiniteLogits, match=r"after position 2 are NaN.*mlx \d"):
        next(emissions)
    assert list(engine.tokens) == [1, 5]


@pytest.mark.parametrize("placement", ["free", "aligned"])
def test_a_draft_that_is_no_number_changes_no_token(placement):
    model = tiny_model("llama", seed=3)
    plain = [t for t, _, _ in mlxspec.generate_step([1, 5, 2], model, max_tokens=20)]
    poison = next(t for t in range(999, 0, -1) if t not in plain)
    # The head is a copy without the poison: only the embedding of the draft is not a number.
    model.lm_head = nn.Linear(64, 1000, bias=False)
    model.lm_head.weight = mx.array(model.model.embed_tokens.weight)
    model.args.tie_word_embeddings = False
    model.model.embed_tokens.weight[poison] = mx.nan
    engine = StaticShapeEngine(model, max_context_length=N, tile_widths=(8,), placement=placement)
    options = SpeculativeDecodingOptions(num_draft_tokens=7)
    decoder = SpeculativeDecoder(engine, Proposes([poison, poison]), options)
    emissions = decoder.generate([1, 5, 2], max_tokens=20)
    assert [emission.token for emission in emissions] == plain
    assert decoder.stats.forwards > decoder.stats.rounds


def test_some_nans_in_a_row_count_as_minus_infinity_and_are_said_once():
    model = tiny_model("llama", seed=3)
    head = mx.array(model.model.embed_tokens.weight)
    plain = [t for t, _, _ in mlxspec.generate_step([1, 5, 2], model, max_tokens=6)]
    unused = next(t for t in range(999, 0, -1) if t not in plain)
    head[unused] = mx.nan
    model.model.embed_tokens.weight = head
    stats = SpeculationStats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = mlxspec.generate_step([1, 5, 2], model, max_tokens=6, stats=stats)
        assert [token for token, _, _ in steps] == plain
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(said) == 1
    assert "1 of 1000 logits after position 2 are NaN" in said[0]
    assert stats.nan_rows == 6


@pytest.mark.filterwarnings("ignore:1 of 1000 logits")
def test_nan_counts_as_minus_infinity_for_a_callers_sampler_and_in_log_probabilities():
    model = tiny_model("llama", seed=3)
    plain = [t for t, _, _ in mlxspec.generate_step([1, 5, 2], model, max_tokens=6)]
    unused = next(t for t in range(999, 0, -1) if t not in plain)
    head = mx.array(model.model.embed_tokens.weight)
    head[unused] = mx.nan
    model.model.embed_tokens.weight = head
    for sampler in (None, lambda row: mx.argmax(row, axis=-1)):
        steps = list(mlxspec.generate_step([1, 5, 2], model, max_tokens=6, sampler=sampler))
        assert [token for token, _, _ in steps] == plain
        for _, logprobs, _ in steps:
            assert logprobs[unused].item() == -np.inf
            assert mx.isnan(logprobs).sum().item() == 0


def test_processors_that_leave_no_number_are_said(model):
    steps = mlxspec.generate_step(
        [1, 2, 3], model, logits_processors=[lambda tokens, logits: logits * mx.nan]
    )
    with pytest.raises(NonFiniteLogits, match="processors left no number"):
        next(steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": 1e-40}, "temp: expected 0 .* or at least"),
        ({"temp": -0.1}, "temp: expected a number from 0"),
        ({"temp": float("nan")}, "temp"),
        ({"temp": 1, "top_p": 1.5}, "top_p: expected a number from 0 to 1"),
        ({"temp": 1, "min_p": -1}, "min_p"),
        ({"temp": 1, "top_k": -1}, "top_k"),
        ({"temp": 1, "top_k": 1000}, "top_k: expected less than the 1000 tokens"),
        ({"temp": 1, "min_tokens_to_keep": 1001}, "min_tokens_to_keep: expected at most the 1000"),
        ({"temp": 1, "xtc_threshold": 0.7}, "xtc_threshold"),
        ({"temp": 1, "seed": -1}, "seed"),
        ({"temp": 1, "seed": 2**64}, "seed"),
        ({"sampler": print, "temp": 1}, "give one or the other"),
        ({"acceptance": "exact"}, "'coupled' or 'rejection'"),
        ({"acceptance": "rejection"}, "needs a temperature"),
        ({"acceptance": "rejection", "temp": 1, "logits_processors": [print]}, "processors"),
        ({"draft_model": "m"}, "draft_model: expected a model of mlx-lm, got 'm'"),
        ({"prompt_cache": []}, "prompt_cache"),
        ({"max_kv_size": 64}, "max_kv_size"),
        ({"kv_bits": 7}, "kv_bits: expected 2, 3, 4, 5, 6 or 8"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size: expected 32, 64 or 128"),
        ({"kv_bits": 8, "engine": "dynamic"}, "kv_bits cannot be honoured by the dynamic engine"),
        ({"input_embeddings": mx.zeros((1, 2))}, "input_embeddings"),
        ({"stream": mx.default_stream(mx.default_device())}, "stream"),
        ({"prompt_lookup": True, "drafter": PromptLookup()}, "not both"),
        ({"engine": "fast"}, "'static' or 'dynamic'"),
        ({"engine": "dynamic", "tile_widths": (1, 2)}, "no tiles"),
        ({"num_draft_tokens": -3}, "num_draft_tokens"),
        ({"tile_widths": ()}, "tile_widths"),
        ({"max_context_length": 1}, "max_context_length"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model, options, message):
    with pytest.raises(ValueError, match=message):
        mlxspec.generate_step([1, 2, 3], model, **options)


def test_a_refused_value_is_shown_in_short(model):
    with pytest.raises(ValueError, match="prompt_cache") as refusal:
        mlxspec.generate_step(
            [1, 2, 3], model, prompt_cache=[f"a long cache {n}" for n in range(99)]
        )
    assert len(str(refusal.value)) < 500


def test_an_unknown_keyword_is_a_type_error(model):
    with pytest.raises(TypeError, match="promt_lookup"):
        mlxspec.generate_step([1, 2, 3], model, promt_lookup=True)


def test_mlx_lms_defaults_are_no_request_and_idle_options_are_named_once(model):
    asks_nothing = {"temp": 0.0, "top_p": 1.0, "min_p": 0.0, "kv_bits": None, "seed": None}
    asks_nothing |= {"kv_group_size": 64, "quantized_kv_start": 5000}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(mlxspec.generate_step([1, 2], model, max_tokens=1, **asks_nothing))
    with pytest.warns(UserWarning, match="without effect: top_p .*seed"):
        list(mlxspec.generate_step([1, 2], model, max_tokens=1, seed=3, top_p=0.5))
    with pytest.warns(UserWarning, match=r"without effect: kv_group_size \(without kv_bits\)$"):
        list(mlxspec.generate_step([1, 2], model, max_tokens=1, kv_group_size=32))


def test_an_engine_of_ones_own_has_its_options_already(engine, model):
    asked = {"kv_bits": 8, "quantized_kv_start": 0, "max_context_length": 30}
    with pytest.raises(ValueError, match="max_context_length, kv_bits, quantized_kv_start: set"):
        mlxspec.generate_step([1, 2], model, engine=engine, **asked)


def test_a_model_the_static_engine_cannot_take_is_refused_by_name_and_runs_plainly_dynamically():
    model = tiny_model("mamba")
    with pytest.raises(UnsupportedModel, match=r"cannot run this model: mamba: .*engine dynamic"):
        mlxspec.generate_step([1, 2, 3], model)
    stats = SpeculationStats()
    steps = mlxspec.generate_step([1, 2, 3], model, max_tokens=4, engine="dynamic", stats=stats)
    assert len(list(steps)) == 4
    assert "mamba" in stats.why_off


@pytest.mark.parametrize("adapts", [True, False])
def test_an_engine_that_does_not_take_drafts_back_ends_the_text_and_says_so(
    engine, monkeypatch, adapts
):
    """A fault of the engine: nothing wrong is emitted, and nothing of it is left behind."""
    prompt = [1, 2, 3]
    plain = [e.token for e in SpeculativeDecoder(engine).generate(prompt, max_tokens=12)]
    engine.reset(0)

    def refuses(to):
        if to:
            raise mlxspec.RewindRefused(f"cannot go back to {to}")
        StaticShapeEngine.reset(engine, to)

    monkeypatch.setattr(engine, "reset", refuses)
    options = SpeculativeDecodingOptions(5, adaptive=adapts)
    wrong = (plain[0] + 1) % engine.vocab_size
    decoder = SpeculativeDecoder(engine, Proposes([wrong] * 3), options, seed=1)
    engine._tile_costs = mlxspec.engine.costs.TileCosts(((1, 1.0), (16, 1.01)))
    emitted = []
    with pytest.raises(mlxspec.RewindRefused, match="engine was emptied: begin again"):
        emitted += (e.token for e in decoder.generate(prompt, max_tokens=12))
    assert emitted == plain[:1]
    assert engine.processed_token_count == 0
    monkeypatch.undo()
    again = [e.token for e in SpeculativeDecoder(engine).generate(prompt, max_tokens=12)]
    assert again == plain


def test_what_failed_is_the_news_where_an_engine_then_does_not_go_back(engine, monkeypatch):
    def refuses(to):
        if to:
            raise mlxspec.RewindRefused(f"cannot go back to {to}")
        StaticShapeEngine.reset(engine, to)

    wrong = Proposes([1, 1, 1])
    steps = SpeculativeDecoder(engine, wrong, SpeculativeDecodingOptions(3)).generate([1, 2, 3])
    monkeypatch.setattr(engine, "reset", refuses)
    next(steps)
    with pytest.raises(KeyError, match="mine"):
        steps.throw(KeyError("mine"))
    assert engine.processed_token_count == 0


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(
    "source", [None, 5, "ab", ("a",), ("a", "b"), ("a", -5), ("a", 1.5), ([], 3), (None, None)]
)
def test_a_source_that_is_no_name_and_evidence_is_refused_by_name(engine, source, chained):
    drafter = Proposes([1])
    drafter.source = source
    whole = mlxspec.Chain(drafter) if chained else drafter
    options = SpeculativeDecodingOptions(adaptive=True)
    steps = SpeculativeDecoder(engine, whole, options).generate([1, 2, 3], max_tokens=9)
    with pytest.raises(DrafterError, match="drafter Proposes: expected source to be a name and"):
        list(steps)


@pytest.mark.parametrize(
    ("tokens", "scores", "message"),
    [
        (np.array([1, 2]), None, "expected tokens on the device"),
        (mx.array([1, 2]), (1, 3), "expected scores float32"),
        (mx.array([1, 2]), (3, None), "expected scores float32"),
    ],
)
def test_a_draft_on_the_device_of_another_shape_is_refused_by_name(engine, tokens, scores, message):
    if scores is not None:
        rows, vocab = scores
        scores = mx.zeros((rows, vocab or engine.vocab_size))
    drafter = Proposes(DeviceDraft(tokens, scores))
    steps = SpeculativeDecoder(engine, drafter).generate([1, 2, 3], max_tokens=9)
    with pytest.raises(DrafterError, match=f"drafter Proposes: {message}"):
        list(steps)
