"""What callers get wrong is named; what is merely of another kind is taken."""

from __future__ import annotations

import pickle
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

import mlxspec
from mlxspec import DrafterError, Sampling, SpeculativeDecoder, StaticShapeEngine
from mlxspec.decoding import CallersChoice
from tests.families.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def ids(model, **options):
    return [t for t, _, _ in mlxspec.generate_step([1, 2, 3], model, max_tokens=8, **options)]


@pytest.mark.parametrize(
    "kind", [lambda w: np.array(w), lambda w: mx.array(w), list, iter, lambda w: range(1, 3)]
)
def test_tile_widths_may_be_any_iterable_of_numbers(model, kind):
    assert ids(model, tile_widths=kind([1, 2])) == ids(model)


@pytest.mark.parametrize("widths", [5, (True, 2), (1.5,), (0,), (100_000,), ("8",), ()])
def test_tile_widths_that_are_none_are_named_even_where_an_engine_is_kept(model, widths):
    ids(model, tile_widths=(1, 2))
    with pytest.raises(ValueError, match="tile_widths"):
        ids(model, tile_widths=widths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span_step": 2.5}, "span step"),
        ({"span_step": True}, "span step"),
        ({"initial_capacity": "a"}, "initial_capacity"),
        ({"initial_capacity": -3}, "initial_capacity"),
        ({"max_context_length": 2.0}, "max_context_length"),
    ],
)
def test_engine_options_of_the_wrong_kind_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        StaticShapeEngine(model, **options)


@pytest.mark.parametrize("engine", ["static", "dynamic"])
def test_numpy_numbers_are_taken_for_lengths(model, engine):
    options = {"max_context_length": np.int64(64), "prefill_step_size": np.int32(4)}
    assert ids(model, engine=engine, **options) == ids(model)


@pytest.mark.parametrize("stop", [np.int64(3), 3, None, mx.array([3])])
def test_stop_tokens_may_be_one_number_or_nothing(model, stop):
    assert ids(model, stop_tokens=() if stop is None else stop)[:1] == ids(model)[:1]


def test_prompt_lookup_is_yes_or_no(model):
    with pytest.raises(ValueError, match="prompt_lookup"):
        ids(model, prompt_lookup="no")


def test_none_asks_for_nothing(model):
    nothing = {"temp": None, "top_p": None, "min_p": None, "top_k": None, "xtc_threshold": None}
    assert ids(model, **nothing) == ids(model)


def test_an_engine_of_another_model_is_refused(model):
    engine = StaticShapeEngine(model, max_context_length=64)
    with pytest.raises(ValueError, match="another model"):
        ids(tiny_model("llama", seed=5), engine=engine)


def test_an_engine_whose_weights_were_replaced_is_refused():
    model = tiny_model("llama")
    engine = StaticShapeEngine(model, max_context_length=64)
    ids(model, engine=engine)
    model.update(tiny_model("llama", seed=5).parameters())
    with pytest.raises(ValueError, match="weights have changed"):
        ids(model, engine=engine)
    with pytest.raises(ValueError, match="weights have changed"):
        SpeculativeDecoder(engine).generate([1, 2])


def test_a_forward_that_replaces_its_own_weights_is_no_change():
    """gemma3n clips two weights of every layer in every forward."""
    model = tiny_model("gemma3n")
    engine = StaticShapeEngine(model, max_context_length=64)
    expected = ids(model, engine=engine)
    assert engine.weights_unchanged
    assert ids(model, engine=engine) == expected
    model.update(tiny_model("gemma3n", seed=5).parameters())
    assert not engine.weights_unchanged


def test_a_model_can_be_pickled_after_generating():
    model = tiny_model("llama")
    expected = ids(model)
    assert ids(pickle.loads(pickle.dumps(model))) == expected


def test_a_generation_with_processors_may_go_on_in_another_thread(model):
    chain = make_logits_processors(repetition_penalty=1.3)
    expected = ids(model, logits_processors=chain)
    steps = mlxspec.generate_step([1, 2, 3], model, max_tokens=8, logits_processors=chain)
    found = [next(steps)[0]]
    thread = threading.Thread(target=lambda: found.extend(token for token, _, _ in steps))
    thread.start()
    thread.join()
    assert found == expected


@pytest.mark.parametrize("token", [2.7, 1000, -1, None, "a"])
def test_a_sampler_that_returns_no_token_is_named_before_anything_is_emitted(model, token):
    steps = mlxspec.generate_step([1, 2, 3], model, sampler=lambda row: token)
    with pytest.raises(ValueError, match="the sampler's token"):
        next(steps)


@pytest.mark.parametrize("proposal", [np.array(3), mx.array(3)])
def test_a_proposal_without_length_is_named(model, proposal):
    class Scalar:
        def propose(self, history, budget):
            return proposal

        def commit(self, length):
            pass

        def reset(self):
            pass

    with pytest.raises(DrafterError, match="drafter Scalar"):
        ids(model, drafter=Scalar())


class WithoutReset:
    def propose(self, history, budget):
        return []

    def commit(self, length):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": WithoutReset()}, "drafter: expected an object .* which lacks reset"),
        ({"drafter": 7}, "lacks propose and commit and reset"),
        ({"drafter": mlxspec.PromptLookup}, r"got the class PromptLookup; make one: PromptLookup"),
        ({"sampler": 0.7}, "sampler: expected a function .* got 0.7"),
        ({"logits_processors": [None]}, r"logits_processors\[0\]: expected a function"),
        ({"logits_processors": [abs, "x"]}, r"logits_processors\[1\]: expected a function"),
        ({"logits_processors": abs}, "logits_processors: expected a list of functions"),
        ({"logits_processors": 3}, "logits_processors: expected a list of functions"),
        ({"prompt_progress_callback": 1}, "prompt_progress_callback: expected a function"),
        ({"stats": {}}, "stats: expected SpeculationStats"),
        ({"engine": 5}, "engine: expected 'static', 'dynamic' or an engine"),
        ({"engine": StaticShapeEngine}, "engine: expected 'static', 'dynamic' or an engine"),
    ],
)
def test_what_is_called_later_is_refused_at_the_call(model, options, message):
    engine = StaticShapeEngine(model, max_context_length=64)
    list(SpeculativeDecoder(engine).generate([1, 2, 3], max_tokens=4))
    calls, held = engine.call_count, list(engine.tokens)
    with pytest.raises(ValueError, match=message):
        mlxspec.generate_step([1, 2, 3], model, **{"engine": engine, **options})
    assert (engine.call_count, list(engine.tokens)) == (calls, held)
    # The engine is free, and goes on as if nobody had asked.
    assert next(mlxspec.generate_step([1, 2, 3], model, engine=engine))[0] == held[3]


@pytest.mark.parametrize(
    "options",
    [{"drafter": WithoutReset()}, {"sampler": 1}, {"logits_processors": [1]}, {"stats": {}}],
)
def test_it_is_refused_before_an_engine_is_made(model, options, monkeypatch):
    monkeypatch.setattr("mlxspec.assembly.engine_for", lambda *a, **k: pytest.fail("made"))
    with pytest.raises(ValueError, match="expected"):
        mlxspec.generate_step([1, 2, 3], model, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: SpeculativeDecoder(engine, WithoutReset()),
        lambda engine: SpeculativeDecoder(StaticShapeEngine),
        lambda engine: SpeculativeDecoder(engine).generate([1, 2], progress="x"),
        lambda engine: CallersChoice([abs], 0.7, Sampling(), mx.array([0, 0], mx.uint32)),
        lambda engine: CallersChoice([None], None, Sampling(), mx.array([0, 0], mx.uint32)),
    ],
)
def test_the_parts_refuse_it_too(model, call):
    engine = StaticShapeEngine(model, max_context_length=64)
    calls = engine.call_count
    with pytest.raises(ValueError, match="expected"):
        call(engine)
    assert engine.call_count == calls


def test_no_engine_is_the_static_one(model):
    assert ids(model, engine=None) == ids(model, engine="static")
