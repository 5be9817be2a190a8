"""The static engine's promises: budgets, rewinds, limits, in-place state, traces, one user."""

from __future__ import annotations

import gc
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxspec import Capture, EngineBusy, StaticShapeEngine
from mlxspec.engine.exclusive import Exclusive, one_call
from mlxspec.engine.spans import SpanRule
from tests.families.tiny import tiny_model

N = 41
SPAN = 16


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def make(model, widths=(1, 2, 4, 8), placement="free", **options):
    options = {"max_context_length": N, "span_step": SPAN} | options
    return StaticShapeEngine(model, tile_widths=widths, placement=placement, **options)


def tokens(count, seed=0):
    return [(7 * i + 3 * seed + i * i) % 97 for i in range(count)]


def snapshot(engine):
    """Everything a refused call must leave alone, bit for bit."""
    state = [bytes(memoryview(array.view(mx.uint8))) for array in engine._state.slots]
    return list(engine.tokens), engine.processed_token_count, state


def refuses(engine, error, message, call):
    before = snapshot(engine)
    with pytest.raises(error, match=message):
        call()
    assert snapshot(engine) == before


# Spans


@given(step=st.sampled_from([1, 8, 16, 256]), position=st.integers(0, 1_000_000))
def test_a_span_is_the_smallest_bucket_above_its_position(step, position):
    rule = SpanRule(step)
    span = rule.span(position)
    assert span > position
    assert span % step == 0
    assert rule.span(span - 1) == span
    if position:
        assert rule.span(position - 1) in (span, position)


def test_buckets_waste_under_an_eighth_and_grow_logarithmically():
    rule = SpanRule(256)
    assert all(rule.span(p) - p <= max(256, p / 8) for p in range(0, 200_000, 7))
    assert len({rule.span(p) for p in range(131_072)}) <= 16 + 8 * 5 + 8


# Budgets and limits


@pytest.mark.parametrize(
    ("widths", "placement"), [((1, 2, 4, 8), "free"), ((5,), "free"), ((8,), "aligned")]
)
def test_budgets_hold_at_every_cursor_up_to_the_last_position(model, widths, placement):
    engine = make(model, widths, placement)
    spans = SpanRule(SPAN)
    for cursor in range(N):
        engine.reset(0)
        engine.prefill(tokens(cursor))
        budget = engine.one_forward_draft_budget
        in_tile = widths[-1] - 1 - (cursor % widths[-1] if placement == "aligned" else 0)
        expected = min(in_tile, spans.span(cursor) - cursor - 1, N - cursor - 2)
        assert budget == max(0, expected)
        longest = engine.max_verify_block_length
        assert longest == N - 1 - cursor
        if longest:
            assert engine.verify(tokens(budget + 1)).forwards == 1
            engine.reset(cursor)
            if budget + 2 <= longest:
                assert engine.verify(tokens(budget + 2)).forwards == 2
                engine.reset(cursor)
            assert len(engine.verify(tokens(longest)).argmax) == longest
            engine.reset(cursor)
        refuses(
            engine, ValueError, "context holds 41", lambda n=longest: engine.verify([1] * (n + 1))
        )


def test_a_prompt_longer_than_the_context_is_refused(model):
    engine = make(model)
    engine.prefill(tokens(4))
    refuses(engine, ValueError, "at most 36 tokens, got 37", lambda: engine.prefill(tokens(37)))


@pytest.mark.parametrize("block", [[], [-1], [1000], [1, 2, 10**9], [1.5], [None], ["a"], [True]])
def test_a_block_that_is_no_block_is_refused_and_changes_nothing(model, block):
    engine = make(model)
    engine.prefill(tokens(5))
    refuses(engine, (ValueError, TypeError), "verify", lambda: engine.verify(block))


def test_the_edges_of_the_vocabulary_are_tokens(model):
    engine = make(model)
    assert len(engine.verify([0, engine.vocab_size - 1]).argmax) == 2


@pytest.mark.parametrize("to", [-1, 6, 100])
def test_a_rewind_to_nowhere_is_refused_and_changes_nothing(model, to):
    engine = make(model)
    engine.prefill(tokens(5))
    assert not engine.allows_rewind(to)
    refuses(engine, ValueError, "from 0 to 5", lambda: engine.reset(to))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "tile_widths"),
        ({"widths": (0, 2)}, "tile_widths"),
        ({"widths": (2.0,)}, "tile_widths"),
        ({"placement": "loose"}, "placement"),
        ({"widths": (4, 8), "placement": "aligned"}, "one tile width"),
        ({"widths": (5,), "placement": "aligned"}, "divides the span step"),
        ({"max_context_length": 1}, "max_context_length"),
        ({"prefill_step_size": 0}, "prefill_step_size"),
        ({"span_step": 0}, "span step"),
    ],
)
def test_impossible_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        make(model, **options)


# Exactness of the tiles


@pytest.mark.parametrize(
    ("widths", "placement"), [((1, 2, 4, 8, 16), "free"), ((3, 5), "free"), ((8,), "aligned")]
)
def test_rows_equal_the_models_own_whatever_the_tiles(model, widths, placement):
    text = tokens(N - 1)
    whole = model(mx.array([text]))[0]
    engine = make(model, widths, placement)
    for length in (1, 2, 3, 7, 8, 16, 17, 39):
        engine.reset(0)
        engine.prefill(text[:1])
        position = 1
        while position < N - 1:
            block = text[position : position + length]
            rows = engine.verify(block, Capture(logits=True, top_k=3))
            assert rows.argmax == mx.argmax(rows.logits, axis=-1).tolist()
            assert rows.top_indices[:, 0].tolist() == rows.argmax
            assert mx.allclose(rows.logits, whole[position : position + len(block)], atol=1e-4)
            position += len(block)


@given(cuts=st.lists(st.tuples(st.integers(1, 17), st.integers(0, 17)), max_size=8))
def test_a_state_after_any_rewinds_is_the_state_of_its_tokens(cuts):
    """Blocks of any length, rewound to any row, then compared with a fresh engine's rows."""
    model = tiny_model("llama")
    engine, fresh = _engines(model)
    engine.reset(0)
    for turn, (length, keep) in enumerate(cuts):
        length = min(length, engine.max_verify_block_length)
        if not length:
            break
        before = engine.processed_token_count
        engine.verify(tokens(length, seed=turn))
        engine.reset(before + min(keep, length))
    if engine.max_verify_block_length:
        fresh.reset(0)
        for token in engine.tokens:
            fresh.verify([token])
        ours, theirs = (e.verify([5], Capture(logits=True)).logits for e in (engine, fresh))
        assert mx.array_equal(ours, theirs)


_KEPT: dict[int, tuple[StaticShapeEngine, StaticShapeEngine]] = {}


def _engines(model):
    if not _KEPT:
        _KEPT[0] = (make(model), make(model, widths=(1,)))
    return _KEPT[0]


def test_prefill_computes_the_state_that_decoding_computes(model):
    text = tokens(33)
    prefilled, decoded = make(model, prefill_step_size=16), make(model)
    prefilled.prefill(text)
    for token in text:
        decoded.verify([token])
    assert prefilled.prefill_forward_count == 3  # 16 + 16 + 1
    ours, theirs = (e.verify([5], Capture(logits=True)).logits for e in (prefilled, decoded))
    assert mx.array_equal(ours, theirs)


def test_the_last_legal_write_stays_in_its_own_head(model):
    engine = make(model, widths=(8,))
    engine.prefill(tokens(N - 2))
    before = [mx.array(array) for array in engine._state.slots]
    engine.verify([1])
    written = slice(N - 2, N - 2 + 8)
    assert engine.capacity >= written.stop
    for old, new in zip(before, engine._state.slots, strict=True):
        changed = mx.any(old != new, axis=(0, 1, 3)).tolist()
        assert not any(changed[: written.start] + changed[written.stop :])
        assert mx.all(mx.any(old != new, axis=3)[:, :, written]).item()


# Cost


def test_no_tile_is_traced_again_inside_a_span(model):
    engine = make(model, max_context_length=600, span_step=1024)
    engine.prefill(tokens(9))
    for length in (1, 2, 3, 5, 8):
        engine.verify(tokens(length))
    traces = engine.trace_count
    for step in range(500):
        at = engine.processed_token_count
        engine.verify(tokens(1 + step % 8))
        engine.reset(at + 1)
    assert engine.trace_count == traces
    assert engine.compiled is True


@pytest.mark.parametrize("capacity", [8192, 32768])
def test_decoding_never_copies_the_state(model, capacity):
    engine = make(
        model, max_context_length=40_000, span_step=1024, initial_capacity=capacity, widths=(8,)
    )
    state = sum(array.nbytes for array in engine._state.slots)
    for _ in range(3):
        engine.verify(tokens(8))
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    resting = mx.get_active_memory()
    for _ in range(5):
        engine.verify(tokens(8))
    # The tile's temporaries do not depend on the capacity: under a megabyte for this model.
    assert state > 2**21
    assert mx.get_peak_memory() - resting < 2**20


def test_capacity_grows_with_use_and_keeps_the_state(model):
    text = tokens(500)
    small = make(model, max_context_length=2000)
    large = make(model, max_context_length=2000, initial_capacity=2000)
    assert small.capacity < large.capacity
    for engine in (small, large):
        for begin in range(0, 500, 50):
            engine.prefill(text[begin : begin + 50])
    assert small.capacity < large.capacity
    ours, theirs = (e.verify([5], Capture(logits=True)).logits for e in (small, large))
    assert mx.array_equal(ours, theirs)


def test_without_a_compiler_the_engine_says_so_and_the_rows_are_the_same(model):
    compiled, uncompiled = make(model), make(model)
    rows = [compiled.verify(tokens(3)).argmax for _ in range(3)]
    assert compiled.compiled is True
    mx.disable_compile()
    try:
        assert [uncompiled.verify(tokens(3)).argmax for _ in range(3)] == rows
    finally:
        mx.enable_compile()
    assert uncompiled.compiled is False


def test_another_default_stream_is_not_taken_for_a_missing_compiler(model):
    engine = make(model)
    for stream in (mx.default_stream(mx.cpu), mx.new_stream(mx.cpu), mx.default_stream(mx.cpu)):
        with mx.stream(stream):
            traces = engine.trace_count
            for _ in range(2):
                engine.reset(0)
                engine.verify(tokens(3))
                assert engine.compiled is not False
    assert engine.trace_count == traces
    assert engine.compiled is True


# Accidents


def test_a_failing_progress_callback_leaves_the_engine_as_it_was(model):
    engine = make(model, prefill_step_size=8)
    engine.prefill(tokens(5))

    def stop_at(processed, total):
        if processed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(tokens(20), stop_at)
    assert list(engine.tokens) == tokens(5)
    fresh = make(model)
    fresh.prefill(tokens(5))
    ours, theirs = (e.verify([5], Capture(logits=True)).logits for e in (engine, fresh))
    assert mx.array_equal(ours, theirs)


def test_a_model_that_fails_inside_a_trace_leaves_the_engine_as_it_was(model, monkeypatch):
    engine = make(model)
    engine.prefill(tokens(5))

    def broken(*arguments, **keywords):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(model), "__call__", broken)
    refuses(engine, RuntimeError, "broken", lambda: engine.verify([1, 2]))


@pytest.mark.parametrize(
    ("widths", "placement"), [((1, 2, 4, 8), "free"), ((8,), "free"), ((8,), "aligned")]
)
def test_a_rejected_row_that_is_no_number_does_not_poison_later_rows(widths, placement):
    model = tiny_model("llama", seed=3)
    poison = 11
    model.model.embed_tokens.weight[poison] = mx.nan
    engine, clean = make(model, widths, placement), make(model, widths, placement)
    for e in (engine, clean):
        e.prefill([1, 2, 3])
    rows = engine.verify([4, poison, 5, 6])
    assert rows.nan_count[1:] == [engine.vocab_size] * 3
    engine.reset(3)
    for token in (4, 7, 8, 9):
        ours, theirs = (e.verify([token], Capture(logits=True)).logits for e in (engine, clean))
        assert mx.array_equal(ours, theirs, equal_nan=True)


# One engine, one sequence


def test_an_engine_works_from_another_thread_and_traces_again_there(model):
    engine = make(model)
    expected = engine.verify(tokens(3)).argmax
    traces = engine.trace_count
    results = []

    def work():
        engine.reset(0)
        results.append(engine.verify(tokens(3)).argmax)
        results.append(engine.compiled)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0] == expected
    assert engine.trace_count == traces + 1
    assert results[1] is not False


def test_engines_that_two_threads_have_used_leave_no_graph_to_later_ones():
    models = [tiny_model("llama", seed=seed) for seed in (1, 2)]
    fresh = [make(one, widths=(1,)).verify([5], Capture(logits=True)).logits for one in models]
    for turn in range(40):
        engine = make(models[turn % 2], widths=(1,))
        rows = []

        def ask(engine=engine, rows=rows):
            engine.reset(0)
            rows.append(engine.verify([5], Capture(logits=True)).logits)

        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        assert all(mx.array_equal(row, fresh[turn % 2]) for row in rows)
        del engine, ask, rows, thread
        gc.collect()


def test_an_engine_that_two_living_threads_have_used_leaves_no_weights_behind():
    def in_use() -> int:
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    def use_one(seed: int) -> None:
        engine = make(tiny_model("llama", seed), widths=(1,))
        engine.verify([5])
        worker.submit(engine.reset, 0).result()
        worker.submit(engine.verify, [5]).result()

    with ThreadPoolExecutor(1) as worker:
        use_one(1)
        before = in_use()
        for seed in range(2, 6):
            use_one(seed)
        weights = sum(array.nbytes for _, array in tree_flatten(tiny_model("llama").parameters()))
        assert in_use() - before < weights // 2


class Guarded:
    def __init__(self):
        self._exclusive = Exclusive()

    @one_call
    def verify(self):
        return self._exclusive.leased


def test_ctrl_c_at_any_moment_leaves_nobody_inside():
    engine, moment, interrupted = Guarded(), random.Random(0), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 2000:
            try:
                delay = moment.uniform(5e-6, 5e-5)
                # Again later: what a finaliser is interrupted by is swallowed.
                signal.setitimer(signal.ITIMER_REAL, delay, 0.1)
                while True:
                    with engine._exclusive.lease():
                        engine.verify()
            except KeyboardInterrupt:
                interrupted += 1
                # Before the exception is let go, nobody is in a call; after it, in a generation.
                engine.verify()
            assert not engine._exclusive.leased
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_two_threads_at_once_are_told_and_nothing_is_mixed(model):
    engine = make(model, prefill_step_size=4)
    inside, leave = threading.Event(), threading.Event()

    def slow(processed, total):
        inside.set()
        assert leave.wait(30)

    thread = threading.Thread(target=lambda: engine.prefill(tokens(8), slow))
    thread.start()
    assert inside.wait(30)
    try:
        for call in (
            lambda: engine.verify([1]),
            lambda: engine.prefill([1]),
            lambda: engine.reset(0),
        ):
            with pytest.raises(EngineBusy, match="another thread"):
                call()
    finally:
        leave.set()
        thread.join()
    assert list(engine.tokens) == tokens(8)


def test_a_call_from_inside_a_call_is_told_so_and_not_to_wait(model):
    engine = make(model, prefill_step_size=4)

    def again(processed, total):
        engine.verify([1])

    with pytest.raises(EngineBusy, match=r"verify: called from inside prefill of .*; call it when"):
        engine.prefill(tokens(8), again)
    assert not list(engine.tokens)
    engine.prefill(tokens(8))


def test_a_second_lease_is_refused_until_the_first_ends(model):
    engine = make(model)
    with engine.lease():
        assert engine.leased
        with pytest.raises(EngineBusy, match="somebody else"), engine.lease():
            pass
    with engine.lease():
        pass
    assert not engine.leased
