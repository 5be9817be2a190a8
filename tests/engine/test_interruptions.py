"""Ctrl-C anywhere inside a call, once or twice: whoever goes on meets nothing of it.

What was written is overwritten, masked or cleared, even if it was no number; the rows that follow
are those of an engine that was never interrupted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import Capture, StaticShapeEngine
from mlxspec.engine.state import ModelState
from tests.cases import prompt_of, varied_model

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


class Interruptions:
    """Raises KeyboardInterrupt at lines of the engine's code, and has the device done till then.

    Args:
        moments: After so many lines, and after so many more, ...
        device_done: Computes what is under way.
    """

    def __init__(self, moments: list[int], device_done: Callable[[], Any]):
        self._moments = list(moments)
        self._device_done = device_done
        self._lines = 0

    def __enter__(self) -> None:
        self._usual = sys.gettrace()
        sys.settrace(self._traced)

    def __exit__(self, *problem: object) -> None:
        sys.settrace(self._usual)

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        # Of `exclusive`, the promise is about CPython's signals and not about lines.
        code = frame.f_code.co_filename
        if not code.startswith(ENGINE_CODE) or code.endswith("exclusive.py"):
            return None
        if event == "line" and self._moments:
            self._lines += 1
            if self._lines >= self._moments[0]:
                self._lines = 0
                del self._moments[0]
                self._device_done()
                raise KeyboardInterrupt
        return self._traced


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


def call(engine: StaticShapeEngine, name: str, block: list[int], to: int, image: Any) -> None:
    """The call that is interrupted."""
    if name == "prefill":
        engine.prefill(block)
    elif name == "verify":
        engine.verify(block[:6], LOGITS)
    elif name == "verify ahead":
        engine.verify(block[:1], ahead=True)
    elif name == "reset":
        engine.reset(to)
    elif name == "image":
        engine.image()
    elif name == "restore":
        engine.restore(image)
    else:
        rollout = engine.roll_out(block[:2], 3)
        if name == "keep":
            engine.keep(rollout.processed)


@pytest.mark.parametrize("setting", SETTINGS)
@given(
    before=st.sampled_from(BEFORE),
    name=st.sampled_from(CALLS),
    length=st.sampled_from([3, 12, 18, 29, 47, 60]),
    block=st.lists(st.sampled_from([1, 5, 8, 13, 40, POISON]), min_size=2, max_size=40),
    moment=st.one_of(st.integers(1, 60), st.integers(60, 600)),
    second=st.none() | st.integers(1, 40),
    share=st.floats(0, 1),
)
def test_whoever_goes_on_after_ctrl_c_meets_nothing_of_the_call(
    setting, before, name, length, block, moment, second, share
):
    interrupted, clean = engines(setting)
    for engine in (interrupted, clean):
        begin(engine)
        engine.prefill(prompt_of(37, seed=8))
        image = engine.image()
        begin(engine)
        prepare(engine, before, length)
    held = list(clean.tokens)
    assert list(interrupted.tokens) == held
    to = clean.longest_rewind(int(share * len(held)))
    moments = [moment] if second is None else [moment, second]
    done = Interruptions(moments, lambda: mx.eval(interrupted._state.slots))
    try:
        with done:
            call(interrupted, name, block, to, image)
    except KeyboardInterrupt:
        pass
    # It has not happened, or it has.
    kept = list(interrupted.tokens)[: interrupted.processed_token_count]
    if kept != held:
        call(clean, name, block, to, image)
        assert kept == list(clean.tokens)[: clean.processed_token_count]
    for token in prompt_of(24, seed=5):
        ours, theirs = (engine.verify([token], LOGITS) for engine in (interrupted, clean))
        if POISON not in kept:
            assert max(theirs.nan_count) <= 1
        assert mx.array_equal(ours.logits, theirs.logits, equal_nan=True)


@pytest.mark.parametrize("call", ["verify", "verify ahead", "roll_out", "prefill"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_an_interrupted_call_wrote_does_not_poison_later_rows(family, call, monkeypatch):
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
    method, run = calls[call]
    if call == "roll_out":
        rolled_out = engine._rolled_out
        monkeypatch.setattr(engine, method, lambda *how: interrupted(rolled_out(*how)))
    else:
        monkeypatch.setattr(engine, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    assert list(engine.tokens) == prompt[:-1]
    for token in prompt_of(25, seed=6):
        ours, theirs = (e.verify([token], Capture(logits=True)) for e in (engine, clean))
        # Of a tied head the poison's own logit is none in every row.
        assert max(theirs.nan_count) <= 1
        assert mx.array_equal(ours.logits, theirs.logits, equal_nan=True)


def go_on_alike(interrupted: StaticShapeEngine, clean: StaticShapeEngine) -> None:
    """Both say the same of the same tokens, and it is numbers."""
    assert list(interrupted.tokens) == list(clean.tokens)
    for token in prompt_of(30, seed=6):
        ours, theirs = (engine.verify([token], LOGITS) for engine in (interrupted, clean))
        assert max(theirs.nan_count) <= 1
        assert mx.array_equal(ours.logits, theirs.logits, equal_nan=True)


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
    interrupted, clean = engines(setting)
    for engine in (interrupted, clean):
        begin(engine)
        engine.prefill(prompt_of(18, seed=4))
    grow = ModelState.grow
    with pytest.MonkeyPatch.context() as patch:
        if again:
            # Ctrl-C, while what was there is put back.
            patch.setattr(ModelState, "grow", lambda state, to: grow_or_stop(grow, state, to))
        with pytest.raises((OSError, KeyboardInterrupt)):
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
    interrupted, clean = engines(setting)
    for engine in (interrupted, clean):
        begin(engine)
        prepare(engine, "restored", length)
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
    interrupted, clean = engines(setting)
    for engine in (interrupted, clean):
        begin(engine)
        prepare(engine, "a rejected draft", 29)
    with pytest.raises(OSError, match="full"):
        interrupted.prefill(prompt_of(20, seed=5), stopping_at(8))
    go_on_alike(interrupted, clean)


@pytest.mark.parametrize("setting", ["llama", "gemma3_text"])
def test_ctrl_c_right_after_the_step_under_way_was_taken_forgets_nothing(setting):
    family, changes, _ = SETTINGS[setting]
    model = copy.deepcopy(varied_model(family, **changes, tie_word_embeddings=False))
    options = {"tile_widths": (1, 2, 4, 8), "span_step": 64, "max_context_length": 120}
    text = prompt_of(30, seed=4)
    asked = StaticShapeEngine(model, **options)
    asked.prefill(text)
    chosen = asked.verify([5]).argmax[0]
    assert chosen not in [*text, 5, *prompt_of(30, seed=6)]
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
