"""Ctrl-C anywhere inside a call, once or twice: whoever goes on meets nothing of it.

What was written is overwritten, masked or cleared, even if it was no number; the rows that follow
are those of an engine that was never interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import Capture, DynamicShapeEngine, StaticShapeEngine
from mlxspec.engine.state import ModelState, StateLayout
from tests.cases import prompt_of, varied_model
from tests.interruptions import Interruptions

POISON = 61
LOGITS = Capture(logits=True)
ENGINE_CODE = str(Path(mlxspec.__file__).parent / "engine")
KV = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "gemma3_text": ("gemma3_text", {}, {}),
    "lfm2": ("lfm2", {}, {}),
    "llama, quantized": ("llama", {"hidden_size": 128, "head_dim": 32}, KV),
    "lfm2, quantized": ("lfm2", {"hidden_size": 128, "block_dim": 128}, KV),
}
BEFORE = ("a prompt", "restored", "a rejected draft", "a prefill that failed", "a step ahead")
CALLS = ("prefill", "verify", "verify ahead", "roll_out", "keep", "reset", "image", "restore")


def in_the_engine(file: str) -> bool:
    """And in its context managers. Of `exclusive`, the promise is about signals, not lines."""
    ours = file.startswith(ENGINE_CODE) and not file.endswith("exclusive.py")
    return ours or file == contextlib.__file__


interruptions = partial(Interruptions, in_the_engine, functions=True)


def poisoned(family: str, **changes: Any) -> nn.Module:
    """A model to which one token is no number."""
    model = copy.deepcopy(varied_model(family, **changes))
    model.model.embed_tokens.weight[POISON] = mx.nan
    return model


@cache
def engines(setting: str) -> tuple[StaticShapeEngine, StaticShapeEngine]:
    """One that is interrupted, and one that is not."""
    family, changes, options = SETTINGS[setting]
    model = poisoned(family, **changes)
    options = {"tile_widths": (1, 2, 4, 8), "span_step": 16, "prefill_step_size": 8} | options
    one, other = (StaticShapeEngine(model, max_context_length=150, **options) for _ in "ab")
    return one, other


def begin(engine: StaticShapeEngine) -> None:
    """Forget everything, room that was made included."""
    engine.reset(0)
    engine._state = ModelState(*engine._state.forms, engine._capacity_for(1))


def prepare(engine: StaticShapeEngine, before: str, length: int) -> None:
    """Bring the engine where it is interrupted."""
    prompt = prompt_of(length, seed=4)
    engine.prefill(prompt)
    if before == "restored":
        image = engine.image()
        begin(engine)
        engine.restore(image)
    elif before == "a rejected draft":
        engine.verify([4, POISON, 6, 7][: engine.max_verify_block_length])
        engine.reset(length)
    elif before == "a prefill that failed":
        with pytest.raises(OSError, match="full"):
            engine.prefill([5, POISON, *prompt_of(30, seed=7)], stopping_at(8))
    elif before == "a step ahead":
        engine.verify([9], ahead=True)


def both(setting: str, before: str, length: int) -> tuple[StaticShapeEngine, StaticShapeEngine]:
    """The setting's engines, brought there."""
    for engine in engines(setting):
        begin(engine)
        prepare(engine, before, length)
    return engines(setting)


def run(engine: StaticShapeEngine, name: str, block: list[int], to: int, image: Any) -> None:
    """The call that is interrupted."""
    block = block if name == "prefill" else block[: min(6, engine.max_verify_block_length)]
    if name == "prefill":
        engine.prefill(block)
    elif name == "verify":
        engine.verify(block, LOGITS)
    elif name == "verify ahead":
        engine.verify(block[:1], ahead=True)
    elif name == "reset":
        engine.reset(to)
    elif name == "image":
        engine.image()
    elif name == "restore":
        engine.restore(image)
    elif (count := min(3, engine.roll_out_limit(len(block)))) > 0:
        rollout = engine.roll_out(block, count)
        if name == "keep":
            engine.keep(rollout.processed)


@pytest.mark.parametrize("setting", SETTINGS)
@given(
    before=st.sampled_from(BEFORE),
    name=st.sampled_from(CALLS),
    length=st.sampled_from([3, 12, 18, 29, 47, 60]),
    block=st.lists(st.sampled_from([1, 5, 8, 13, 40, POISON]), min_size=2, max_size=40),
    moment=st.floats(0, 1, exclude_max=True),
    second=st.none() | st.integers(1, 40),
    ahead=st.booleans(),
    share=st.floats(0, 1),
)
def test_whoever_goes_on_after_ctrl_c_meets_nothing_of_the_call(
    setting, before, name, length, block, moment, second, ahead, share
):
    interrupted, clean = engines(setting)

    def prepared(engine: StaticShapeEngine) -> Any:
        begin(engine)
        engine.prefill(prompt_of(37, seed=8))
        image = engine.image()
        begin(engine)
        prepare(engine, before, length)
        return image

    prepared(clean)
    held = list(clean.tokens)
    to = clean.longest_rewind(int(share * len(held)))
    image = prepared(interrupted)
    with interruptions() as whole:
        run(interrupted, name, block, to, image)
    lines, times = whole.lines, 0
    while not times:
        image = prepared(interrupted)
        assert list(interrupted.tokens) == held
        moments = [1 + int(moment * lines), *([] if second is None else [second])]
        done = interruptions(moments, device_done=lambda: mx.eval(interrupted._state.slots))
        with contextlib.suppress(KeyboardInterrupt), done:
            run(interrupted, name, block, to, image)
        times = len(moments) - len(done.left)
        # What the first run traced takes fewer lines now.
        lines = done.lines
    # It has not happened, or it has.
    kept = list(interrupted.tokens)[: interrupted.processed_token_count]
    if kept != held:
        run(clean, "roll_out" if name == "keep" else name, block, to, image)
        if name == "keep":
            clean.keep(len(kept) - clean.processed_token_count)
        assert kept == list(clean.tokens)[: clean.processed_token_count]
    for token in prompt_of(24, seed=5):
        ours = interrupted.verify([token], LOGITS, ahead=ahead)
        theirs = clean.verify([token], LOGITS)
        if POISON not in kept:
            assert max(theirs.nan_count) <= 1
        assert mx.array_equal(ours.logits, theirs.logits, equal_nan=True)
        assert interrupted.compiled is not False


@pytest.mark.parametrize("name", ["verify", "verify ahead", "roll_out", "prefill"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_an_interrupted_call_wrote_does_not_poison_later_rows(family, name, monkeypatch):
    prompt, model = prompt_of(30, seed=4), poisoned(family)
    options = {"tile_widths": (1, 2, 4, 8), "span_step": 16, "prefill_step_size": 8}
    engine, clean = (StaticShapeEngine(model, max_context_length=90, **options) for _ in "ab")
    for e in (engine, clean):
        e.prefill(prompt[:-1])
    block = [prompt[-1], 4, POISON, 5, 6, 7, 8, 9, 10]

    def interrupted(*arguments):
        # The device has done its work; nobody has read what came of it.
        mx.eval(engine._state.slots)
        raise KeyboardInterrupt

    calls = {
        "verify": ("_read_rows", lambda: engine.verify(block[:5])),
        "verify ahead": ("_read_rows", lambda: engine.verify([POISON], ahead=True)),
        "roll_out": ("_rolled_out", lambda: engine.roll_out(block[:5], 1)),
        "prefill": ("_finish_prefill_tile", lambda: engine.prefill(block)),
    }
    method, interrupted_call = calls[name]
    if name == "roll_out":
        rolled_out = engine._rolled_out
        monkeypatch.setattr(engine, method, lambda *how: interrupted(rolled_out(*how)))
    else:
        monkeypatch.setattr(engine, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        interrupted_call()
    monkeypatch.undo()
    assert list(engine.tokens) == prompt[:-1]
    go_on_alike(engine, clean)


def go_on_alike(interrupted: StaticShapeEngine, clean: StaticShapeEngine) -> None:
    """Both say the same of the same tokens, and it is numbers.

    But for the poison's own logit, which a tied head has in every row.
    """
    assert list(interrupted.tokens) == list(clean.tokens)
    for token in prompt_of(30, seed=6):
        ours, theirs = (engine.verify([token], LOGITS) for engine in (interrupted, clean))
        assert max(theirs.nan_count) <= 1
        assert mx.array_equal(ours.logits, theirs.logits, equal_nan=True)
        assert interrupted.compiled is not False
    assert interrupted.compiled is True


def stopping_at(tokens: int) -> Callable[[int, int], None]:
    """A progress callback that raises after so many."""

    def stop(processed: int, total: int) -> None:
        if processed >= tokens:
            raise OSError("full")

    return stop


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stop", [8, 24, 40, 80])
@pytest.mark.parametrize("setting", ["llama, quantized", "lfm2, quantized", "gemma3_text"])
def test_a_prefill_that_grew_and_quantised_the_state_before_it_stopped(setting, stop, again):
    interrupted, clean = both(setting, "a prompt", 18)
    grow = ModelState.grow
    with pytest.MonkeyPatch.context() as patch:
        if again:
            # Ctrl-C, while what was there is put back.
            patch.setattr(ModelState, "grow", lambda state, to: grow_or_stop(grow, state, to))
        with pytest.raises(KeyboardInterrupt if again else OSError):
            interrupted.prefill(prompt_of(100, seed=8), stopping_at(stop))
    go_on_alike(interrupted, clean)


def grow_or_stop(grow: Callable[..., None], state: ModelState, to: int) -> None:
    """Grow in the call itself; be interrupted where its failure is dealt with."""
    if sys.exc_info()[0] is OSError:
        raise KeyboardInterrupt
    grow(state, to)


@pytest.mark.parametrize("name", ["verify", "prefill"])
@pytest.mark.parametrize("length", [40, 57, 58, 60, 63])
@pytest.mark.parametrize("setting", ["llama", "gemma3_text", "lfm2"])
def test_a_call_that_stops_in_a_restored_state_clears_no_slot_that_is_not_there(
    setting, length, name
):
    interrupted, clean = both(setting, "restored", length)
    calls = {
        "verify": lambda: interrupted.verify([5]),
        "prefill": lambda: interrupted.prefill(prompt_of(20, seed=5), stopping_at(8)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupted, "_read_rows", lambda *arguments: stopping_at(0)(0, 0))
        with pytest.raises(OSError, match="full"):
            calls[name]()
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("setting", ["llama", "gemma3_text", "lfm2"])
def test_rings_that_a_failed_prefill_gives_back_are_cleared_again(setting):
    interrupted, clean = both(setting, "a rejected draft", 29)
    with pytest.raises(OSError, match="full"):
        interrupted.prefill(prompt_of(20, seed=5), stopping_at(8))
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("failing", ["drafts", "prefill"])
@pytest.mark.parametrize("setting", ["llama", "gemma3_text", "lfm2"])
def test_a_step_under_way_is_dropped_where_another_call_fails(setting, failing):
    interrupted, clean = both(setting, "a prompt", 20)
    rows = interrupted.verify([9], LOGITS, ahead=True)
    assert mx.array_equal(rows.logits, clean.verify([9], LOGITS).logits, equal_nan=True)
    calls: dict[str, Callable[[], Any]] = {
        "drafts": lambda: interrupted.verify([1], drafted=np.array([2])),
        "prefill": lambda: interrupted.prefill([1, 2, 3], stopping_at(1)),
    }
    with pytest.raises((TypeError, OSError)):
        calls[failing]()
    for _ in range(20):
        token = rows.argmax[0]
        rows = interrupted.verify([token], LOGITS, ahead=True)
        expected = clean.verify([token], LOGITS)
        assert mx.array_equal(rows.logits, expected.logits, equal_nan=True)


@pytest.mark.parametrize("setting", ["llama", "gemma3_text"])
def test_a_step_under_way_is_dropped_where_what_it_wrote_is_to_be_cleared(setting):
    interrupted, clean = both(setting, "a step ahead", 20)
    token = interrupted.verify([8], LOGITS, ahead=True).argmax[0]
    clean.verify([8], LOGITS)
    # As Ctrl-C leaves it that comes right after a look at what nobody had read.
    interrupted._state.non_finite_until = interrupted._state.written
    for _ in range(10):
        rows = interrupted.verify([token], LOGITS, ahead=True)
        expected = clean.verify([token], LOGITS)
        assert mx.array_equal(rows.logits, expected.logits, equal_nan=True)
        token = rows.argmax[0]


@pytest.mark.parametrize("how", ["prefilled", "restored"])
@pytest.mark.parametrize("setting", ["llama", "gemma3_text"])
def test_a_prompt_that_was_no_number_leaves_nothing_to_a_shorter_one(setting, how):
    interrupted, clean = both(setting, "a prompt", 10)
    interrupted.prefill([5, POISON, 6, 7])
    if how == "restored":
        image = interrupted.image()
        begin(interrupted)
        interrupted.restore(image)
    interrupted.reset(10)
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("call", ["roll_out", "prefill", "verify"])
@pytest.mark.parametrize("setting", ["llama, quantized", "gemma3_text", "lfm2"])
def test_what_failed_in_a_thread_is_no_matter_to_another(setting, call, monkeypatch):
    """MLX computes in another thread nothing that was not begun in its own."""
    interrupted, clean = both(setting, "a rejected draft", 29)

    def stop(*anything: Any) -> bool:
        raise OSError("full")

    def work() -> None:
        if call == "roll_out":
            interrupted.roll_out([5, 6], 3, go_on=stop)
        elif call == "prefill":
            interrupted.prefill(prompt_of(20, seed=5), stopping_at(8))
        else:
            interrupted.verify([5, POISON])

    if call == "verify":
        monkeypatch.setattr(interrupted, "_read_rows", stop)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="full"):
            pool.submit(work).result()
        monkeypatch.undo()
        go_on_alike(interrupted, clean)


@pytest.mark.parametrize("setting", ["llama, quantized", "gemma3_text", "lfm2"])
def test_an_image_of_one_thread_is_restored_in_another(setting):
    engine, clean = both(setting, "a prompt", 29)
    with ThreadPoolExecutor(1) as pool:
        image = pool.submit(engine.image).result()
        begin(engine)
        engine.restore(image)
        go_on_alike(engine, clean)


@pytest.mark.parametrize("setting", ["llama", "gemma3_text"])
def test_where_slots_cannot_be_cleared_the_engine_is_emptied(setting, monkeypatch):
    interrupted, clean = both(setting, "a rejected draft", 29)

    def lost(*arguments: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(StateLayout, "clear", lost)
    with pytest.raises(RuntimeError, match=r"engine was emptied.*the device is lost"):
        interrupted.verify([5])
    monkeypatch.undo()
    assert not list(interrupted.tokens)
    for engine in (interrupted, clean):
        engine.reset(0)
        engine.prefill(prompt_of(29, seed=4))
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("setting", ["llama", "gemma3_text"])
def test_ctrl_c_right_after_the_step_under_way_was_taken_forgets_nothing(setting):
    family, changes, _ = SETTINGS[setting]
    model = copy.deepcopy(varied_model(family, **changes, tie_word_embeddings=False))
    options = {"tile_widths": (1, 2, 4, 8), "span_step": 64, "max_context_length": 120}
    asked = StaticShapeEngine(model, **options)
    for seed in range(20):
        text = prompt_of(30, seed)
        asked.reset(0)
        asked.prefill(text)
        chosen = asked.verify([5]).argmax[0]
        if chosen not in [*text, 5, *prompt_of(30, seed=6)]:
            break
    model.model.embed_tokens.weight[chosen] = mx.nan
    interrupted, clean = (StaticShapeEngine(model, **options) for _ in "ab")
    for engine in (interrupted, clean):
        engine.prefill(text)
        assert engine.verify([5], ahead=engine is interrupted).argmax == [chosen]
    taken = interrupted._begun

    def take(*arguments: Any) -> None:
        assert taken(*arguments) is not None
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupted, "_begun", take)
        with pytest.raises(KeyboardInterrupt):
            interrupted.verify([chosen])
    for engine in (interrupted, clean):
        engine.reset(30)
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("grown", [0, 1, 2, 3])
@pytest.mark.parametrize("setting", ["llama, quantized", "gemma3_text", "lfm2"])
def test_where_there_is_no_room_to_grow_the_engine_is_as_it_was(setting, grown, monkeypatch):
    interrupted, clean = both(setting, "a prompt", 16)
    for engine in (interrupted, clean):
        # Their tiles have been traced before the arrays change.
        for token in (5, 6):
            engine.verify([token], LOGITS)
    evaluate, most, left = mx.eval, interrupted.capacity, [grown]

    def no_room(*arrays: Any) -> None:
        if any(isinstance(array, mx.array) and array.shape[2] > most for array in arrays):
            if not left[0]:
                raise RuntimeError("no room")
            left[0] -= 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", no_room)
    with pytest.raises(RuntimeError, match="no room"):
        interrupted.prefill(prompt_of(120, seed=8))
    monkeypatch.undo()
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("setting", ["llama, quantized", "gemma3_text", "lfm2"])
def test_where_there_is_no_room_for_what_was_there_the_engine_is_emptied(setting, monkeypatch):
    interrupted, clean = engines(setting)
    for engine in (interrupted, clean):
        begin(engine)
    interrupted.prefill(prompt_of(18, seed=4))

    def no_room(*arguments: Any) -> None:
        raise RuntimeError("no room")

    def fail(processed: int, total: int) -> None:
        if processed:
            monkeypatch.setattr(ModelState, "grow", no_room)
            raise OSError("full")

    with pytest.raises(RuntimeError, match="the engine was emptied"):
        interrupted.prefill(prompt_of(20, seed=8), fail)
    monkeypatch.undo()
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("calls", [("prefill",), ("verify",), ("reset",), ("prefill", "reset")])
def test_a_dynamic_engine_is_right_or_empty_after_ctrl_c_at_any_line(calls):
    model = varied_model("llama")
    interrupted, clean = DynamicShapeEngine(model), DynamicShapeEngine(model)
    text = prompt_of(12, seed=4)

    def go(engine: DynamicShapeEngine, calls: Sequence[str]) -> None:
        for call in calls:
            if call == "prefill":
                engine.prefill(prompt_of(5, seed=5))
            elif call == "verify":
                engine.verify([7])
            else:
                engine.reset(6)

    def kept(engine: DynamicShapeEngine) -> tuple[int, ...]:
        return tuple(engine.tokens)[: engine.processed_token_count]

    def begin_anew(engine: DynamicShapeEngine) -> None:
        engine.reset(0)
        engine.prefill(text)

    expected: dict[tuple[int, ...], Any] = {}
    for count in range(len(calls) + 1):
        begin_anew(clean)
        go(clean, calls[:count])
        held = kept(clean)
        expected[held] = clean.verify([9], LOGITS).logits
    clean.reset(0)
    expected[()] = clean.verify([9], LOGITS).logits
    begin_anew(interrupted)
    with interruptions() as whole:
        go(interrupted, calls)
    assert whole.lines > 10
    for moment in range(1, whole.lines + 1):
        for second in ([], [1], [3]):
            begin_anew(interrupted)
            with contextlib.suppress(KeyboardInterrupt), interruptions([moment, *second]):
                go(interrupted, calls)
            rows = expected[kept(interrupted)]
            assert mx.array_equal(interrupted.verify([9], LOGITS).logits, rows)


@pytest.mark.parametrize(("family", "kept"), [("llama", 12), ("mamba2", 0)])
def test_a_dynamic_engine_goes_back_where_progress_raises_or_is_empty(family, kept):
    model, text = varied_model(family), prompt_of(12, seed=4)
    interrupted, clean = (DynamicShapeEngine(model, prefill_step_size=4) for _ in "ab")
    interrupted.prefill(text)
    with pytest.raises(OSError, match="full"):
        interrupted.prefill(prompt_of(11, seed=5), stopping_at(8))
    assert list(interrupted.tokens) == text[:kept]
    clean.prefill(text[:kept])
    ours, theirs = (engine.verify([9], LOGITS).logits for engine in (interrupted, clean))
    assert mx.array_equal(ours, theirs)


def test_an_exception_that_was_interrupted_while_it_was_handled_is_handled_no_more():
    @contextlib.contextmanager
    def managed():
        yield

    def enter_and_leave():
        with managed():
            pass

    with interruptions() as counted:
        enter_and_leave()
    with interruptions([1, 2]) as twice:
        for left in (1, 0):
            with pytest.raises(KeyboardInterrupt):
                enter_and_leave()
            assert len(twice.left) == left
    times = 0
    for line in range(1, counted.lines + 1):
        with contextlib.suppress(KeyboardInterrupt), interruptions([line]) as interrupted:
            enter_and_leave()
        assert sys.exc_info() == (None, None, None)
        times += not interrupted.left
    assert times > counted.lines // 2
