"""A step submitted before its token is read is the step that a call for it would have made."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec import Capture, StaticShapeEngine
from mlxspec.decoding import Sampling
from mlxspec.decoding.sampling import noise_key
from mlxspec.engine.ahead import StepAhead
from mlxspec.engine.rows import DecodeTile
from mlxspec.engine.support import model_from_config
from tests.engine.test_rollout import FAMILIES, KEY, N, engines, plain
from tests.families.tiny import set_random_weights, tiny_configs, tiny_model
from tests.quantized.test_quantized_state import quantized_engine

OTHER_KEY = noise_key(6)
WHOLE = Capture(logits=True)
RAW = Capture(logits=True, raw=True)

CALLS = st.one_of(
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("drafts"), st.integers(1, 7)),
    st.tuples(st.just("other token"), st.integers(0, 50)),
    st.tuples(st.just("other capture"), st.booleans()),
    st.tuples(st.just("other key"), st.booleans()),
    st.tuples(st.just("restore"), st.integers(0, 50)),
    st.tuples(st.just("rewind"), st.integers(1, 12)),
    st.tuples(st.just("prefill"), st.integers(1, 9)),
    st.tuples(st.just("roll out"), st.integers(1, 4)),
    st.tuples(st.just("image"), st.just(0)),
)


def same_images(one, other):
    """Whether two engines hold the same, bit for bit."""
    assert (one.tokens, one.first, one.pinned, one.reached) == (
        other.tokens,
        other.first,
        other.pinned,
        other.reached,
    )
    assert [c.position for c in one.checkpoints] == [c.position for c in other.checkpoints]
    arrays = [
        [*image.slots, *(a for c in image.checkpoints for a in c.arrays)] for image in (one, other)
    ]
    for mine, theirs in zip(*arrays, strict=True):
        assert mx.array_equal(mine, theirs)


@given(
    family=st.sampled_from(FAMILIES),
    widths=st.sampled_from([None, (2, 4, 8), (1, 2)]),
    length=st.integers(1, 30),
    sampled=st.booleans(),
    calls=st.lists(CALLS, min_size=1, max_size=14),
)
def test_whatever_is_called_next_nothing_tells_that_a_step_was_ahead(
    family, widths, length, sampled, calls
):
    """Two engines, one of which steps ahead: rows, history, and what rewinds allow are equal."""
    *both, stranger = engines(family, widths, 3)
    scores = Sampling(1.0) if sampled else None
    text = [(5 * i + i * i // 3) % 60 + 1 for i in range(length)]
    for one in both:
        one.reset(0)
        one.prefill(text[:-1])
    anchor = text[-1]
    for call, argument in calls:
        room = N - 1 - both[0].processed_token_count
        if room < 10:
            break
        capture, key = Capture(logits=True, scores=scores), KEY
        block = [anchor]
        if call == "drafts":
            budget = min(one.one_forward_draft_budget for one in both)
            block += [(anchor + 3 * i) % 60 for i in range(min(argument, budget))]
        elif call == "other token":
            block = [argument]
        elif call == "other capture":
            capture = RAW
        elif call == "other key":
            key = OTHER_KEY
        elif call == "restore":
            # Another text of the same length, after which the same token may come.
            stranger.reset(0)
            stranger.prefill([(3 * i + argument) % 60 for i in range(one.processed_token_count)])
            image = stranger.image()
            for one in both:
                one.restore(image)
        elif call == "rewind":
            to = max(0, both[0].processed_token_count - argument)
            assert both[0].longest_rewind(to) == both[1].longest_rewind(to)
            to = both[1].longest_rewind(to)
            for one in both:
                one.reset(to)
        elif call == "prefill":
            for one in both:
                one.prefill(range(1, 1 + argument))
        elif call == "roll out":
            rolled = []
            for one in both:
                count = min(argument, one.roll_out_limit(1))
                rolled.append(one.roll_out(block, count, capture, KEY).ids(count))
                one.keep(count - 1)
            assert rolled[0] == rolled[1]
            block = rolled[0][-1:]
        elif call == "image":
            same_images(*(one.image() for one in both))
        ahead = argument if call == "step" else True
        rows = both[0].verify(block, capture, key, ahead=ahead)
        expected = both[1].verify(block, capture, key)
        assert rows.argmax == expected.argmax
        assert mx.array_equal(rows.logits, expected.logits)
        assert rows.forwards == expected.forwards
        assert both[0].processed_token_count == both[1].processed_token_count
        assert list(both[0].tokens) == list(both[1].tokens)
        assert both[0].one_forward_draft_budget == both[1].one_forward_draft_budget
        assert both[0].max_verify_block_length == both[1].max_verify_block_length
        anchor = rows.argmax[-1]


@pytest.mark.parametrize("widths", [None, (1, 2), (2,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_ahead_to_the_contexts_end_are_plain_decoding_in_as_many_forwards(family, widths):
    engine, other = engines(family, widths)
    text = [3, 4, 5]
    expected = plain(other, text, N - 3)
    engine.reset(0)
    engine.prefill(text[:-1])
    before, ahead = engine.forward_count, 0
    while len(text) < N:
        rows = engine.verify(text[-1:], Capture(), KEY, ahead=True)
        ahead += rows.ahead
        text += rows.argmax
    assert text == expected
    assert engine.forward_count - before == N - 3
    # Not past the ends of spans, of which N has four, nor past the context's.
    assert ahead == N - 3 - 5


@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "llama"])
def test_a_long_block_begins_no_step_and_can_be_rejected_whole(family):
    """Behind the longest, the rings have no room for a step."""
    engine, _ = engines(family)
    for start in range(1, 30):
        engine.reset(0)
        engine.prefill(range(1, 1 + start))
        length = engine.max_verify_block_length
        assert not engine.verify([7] * length, ahead=True).ahead
        engine.reset(start)


def test_whether_a_step_is_what_is_asked_for_is_known_without_waiting_for_it():
    """Else the device would have nothing to do between two steps, and nobody would notice."""
    chosen_by = DecodeTile([mx.array([[4, 7, 2, 2], [0, 0, 0, 0]])], slice(1, 2), 4)
    unreadable = DecodeTile([], slice(0, 1), 5)
    step = StepAhead(5, chosen_by, WHOLE, KEY, unreadable, [])
    assert chosen_by.choice == 7
    chosen_by.outputs.clear()
    assert step.serves([7], WHOLE, KEY)
    for block, capture, key in [
        ([4], WHOLE, KEY),
        ([7, 7], WHOLE, KEY),
        ([7], RAW, KEY),
        ([7], WHOLE, OTHER_KEY),
        ([7], WHOLE, None),
    ]:
        assert not step.serves(block, capture, key)
    assert not any(isinstance(value, mx.array) for value in vars(step).values() if value is not KEY)


@pytest.mark.parametrize("family", ["llama", "mamba2", "lfm2"])
def test_the_next_step_is_submitted_before_the_one_under_way_is_read(family, monkeypatch):
    engine, _ = engines(family, (1, 2))
    engine.reset(0)
    engine.prefill([1, 2])
    text, order = [3], []
    head, submitted = DecodeTile.head.func, engine._submitted_tile
    monkeypatch.setattr(
        DecodeTile, "head", property(lambda tile: (order.append(id(tile)), head(tile))[1])
    )
    monkeypatch.setattr(
        engine, "_submitted_tile", lambda *how: (order.append("submit"), submitted(*how))[1]
    )
    for _ in range(4):
        text += engine.verify(text[-1:], ahead=True).argmax
        order.clear()
        under_way = id(engine._ahead.tile)
        text += engine.verify(text[-1:], ahead=True).argmax
        assert under_way in order
        assert "submit" in order[: order.index(under_way)]


def test_a_step_that_is_not_used_is_counted_as_a_forward():
    engine, _ = engines("llama")
    engine.reset(0)
    engine.prefill([1, 2])
    before = engine.forward_count
    token = engine.verify([3], ahead=True).argmax[0]
    assert engine.forward_count - before == 2
    engine.verify([token, 5])
    assert engine.forward_count - before == 3


def test_a_step_ahead_may_be_taken_by_another_thread():
    """Recurrent states too, which the step leads to and its token does not need."""
    for family in FAMILIES:
        engine, other = engines(family)
        expected = plain(other, [1, 2, 3], 12)
        engine.reset(0)
        engine.prefill([1, 2])
        text, failures = [1, 2, 3], []

        def step(engine=engine, text=text, failures=failures):
            try:
                text.extend(engine.verify(text[-1:], Capture(), KEY, ahead=True).argmax)
            except BaseException as failure:
                failures.append(failure)

        for _ in range(12):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
        assert not failures
        assert text == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_ahead_of_a_row_that_is_no_number_is_made_again(family):
    """A NaN that is masked poisons rows on the CPU, so what it wrote has to be zeroed first."""
    results = []
    for ahead in (True, False):
        model = tiny_model(family)
        engine = StaticShapeEngine(model, max_context_length=N, span_step=16, tile_widths=(2,))
        engine.prefill([1, 2, 3])
        decode_tile, poisoned = engine._decode_tile, []

        def poisoning(position, *how, decode_tile=decode_tile, poisoned=poisoned):
            tile = decode_tile(position, *how)
            if position == 5 and not poisoned:
                poisoned.append(1)
                head = tile.outputs[0]
                tile.outputs[0] = mx.concatenate([head[:1], head[1:] + 1])
            return tile

        engine._decode_tile = poisoning
        token, tokens, went = 4, [], []
        for _ in range(8):
            rows = engine.verify([token], ahead=ahead)
            went.append(rows.ahead)
            token = rows.argmax[0]
            tokens.append(token)
        assert poisoned
        # The step after the row at position 5 is not kept.
        assert went == [ahead and i != 2 for i in range(8)]
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("widths", [(1, 4), (4,)])
def test_an_unused_step_that_was_no_number_poisons_nothing(widths):
    """NaN past the cursor would poison every later row on CPU."""
    model = model_from_config(tiny_configs()["llama"] | {"tie_word_embeddings": False})
    set_random_weights(model, seed=3)
    options = {"max_context_length": N, "span_step": 16, "tile_widths": widths}
    clean = StaticShapeEngine(model, **options)
    chosen = clean.verify([1]).argmax[0]
    expected = clean.verify([2, 3], Capture(logits=True)).logits
    model.model.embed_tokens.weight[chosen] = mx.nan
    engine = StaticShapeEngine(model, **options)
    rows = engine.verify([1], ahead=True)
    assert (rows.argmax, rows.ahead) == ([chosen], True)
    assert mx.array_equal(engine.verify([2, 3], Capture(logits=True)).logits, expected)


@pytest.mark.parametrize("family", ["llama", "mamba2", "lfm2"])
def test_ctrl_c_inside_a_call_leaves_no_step_under_way(family, monkeypatch):
    engine, other = engines(family, (2, 4, 8))
    for last in range(1, 9):
        for one in (engine, other):
            one.reset(0)
            one.prefill(range(1, 9))
        token = other.verify([9], WHOLE).argmax[0]
        other.reset(0)
        other.prefill(range(1, 9))

        def interrupted(*how):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "_read_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.verify([9], WHOLE, ahead=True)
        monkeypatch.undo()
        # A recurrent state takes so few tokens without a forward; then comes the step's own.
        rows = []
        for one in (engine, other):
            one.prefill([last])
            rows.append(one.verify([token], WHOLE).logits)
        assert mx.array_equal(*rows)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_a_device_that_fails_leaves_no_step_under_way(monkeypatch, family):
    engine, other = engines(family)
    engine.reset(0)
    engine.prefill([1, 2])
    token = engine.verify([3], WHOLE, ahead=True).argmax[0]
    evaluate = mx.eval

    def failing(*arrays):
        monkeypatch.setattr(mx, "eval", evaluate)
        raise RuntimeError("lost")

    monkeypatch.setattr(mx, "eval", failing)
    with pytest.raises(RuntimeError, match="the engine was emptied"):
        engine.verify([token], WHOLE, ahead=True)
    assert engine.processed_token_count == 0
    assert engine._ahead is None
    # After other tokens up to where the lost step stood comes the token that it began with.
    token = plain(other, [1, 2, 3], 2)[-1]
    other.reset(0)
    for one in (engine, other):
        one.prefill([30, 31, 32, 33])
    rows = [one.verify([token], WHOLE).logits for one in (engine, other)]
    assert mx.array_equal(*rows)


def test_keys_that_become_quantised_are_not_converted_ahead():
    """It could not be taken back, and the text may end before."""
    engine = quantized_engine(start=6)
    engine.prefill([1, 2, 3])
    token, went = 4, []
    for _ in range(5):
        rows = engine.verify([token], ahead=True)
        went.append((rows.ahead, engine._state.is_quantized))
        token = rows.argmax[0]
    assert went == [(True, False), (True, False), (False, False), (True, True), (True, True)]
