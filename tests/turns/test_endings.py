"""However a turn ends, the next one is right: stops, limits, closed generators, Ctrl-C, errors."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxspec
from mlxspec import (
    DraftModel,
    DynamicShapeEngine,
    PromptLookup,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
)
from tests.cases import exact, prompt_of, varied_model
from tests.conftest import PROFILE
from tests.decoding.text import byte_level_tokenizer, ids_of
from tests.hostile import PlannedDrafter
from tests.interruptions import Interruptions
from tests.scripted import ScriptedEngine

FAMILIES = ("llama", "gemma3_text", "lfm2")
PROMPT = prompt_of(21)
PLAN = [("right", 7), ("right then wrong", 6), ("wrong", 3)]
COUNT = 12
PACKAGE = str(Path(mlxspec.__file__).parent)
INTERRUPTED = tuple(
    f"{PACKAGE}/{name}"
    for name in (
        "decoding/decoder.py",
        "drafting/model.py",
        "engine/static.py",
        "engine/reach.py",
        "engine/rows.py",
        "engine/state/model_state.py",
    )
)


interruptions = partial(Interruptions, INTERRUPTED.__contains__)


@pytest.fixture(autouse=True)
def uncompiled():
    """Endings are about bookkeeping; graphs are run as they are."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def model_of(family):
    return varied_model(family)


@cache
def engine_of(family, which="drafted"):
    return StaticShapeEngine(
        model_of(family),
        max_context_length=100,
        tile_widths=(1, 2, 4, 8),
        prefill_step_size=16,
        span_step=32,
    )


@cache
def plain_text(family, prompt):
    engine = engine_of(family, "plain")
    engine.reset(0)
    return tuple(e.token for e in SpeculativeDecoder(engine).generate(list(prompt), max_tokens=30))


def drafter_of(family, prompt):
    text = [*prompt, *plain_text(family, tuple(prompt))]
    return PlannedDrafter(text, PLAN, engine_of(family).vocab_size)


def begin(family, prompt):
    decoder = SpeculativeDecoder(
        engine_of(family), drafter_of(family, prompt), SpeculativeDecodingOptions(7)
    )
    return decoder.generate(prompt, max_tokens=COUNT)


def taken_from(emissions, emitted):
    """Take all there are, and remember the tokens on the way."""
    for token, *_ in emissions:
        emitted.append(token)


def following(prompt, emitted):
    return [*prompt, *emitted, *prompt_of(4, seed=3)]


@cache
def plain_following(family, count):
    """What plain decoding says in a second turn if the first was stopped after `count` tokens."""
    engine = engine_of(family, "plain")
    engine.reset(0)
    emitted = []
    if count:
        emissions = SpeculativeDecoder(engine).generate(PROMPT, max_tokens=COUNT)
        emitted = [next(emissions).token for _ in range(count)]
        emissions.close()
    emissions = SpeculativeDecoder(engine).generate(following(PROMPT, emitted), max_tokens=8)
    return [e.token for e in emissions]


def next_turn(family, emitted):
    prompt = following(PROMPT, emitted)
    drafter = PlannedDrafter(
        prompt + plain_following(family, len(emitted)), PLAN, engine_of(family).vocab_size
    )
    decoder = SpeculativeDecoder(engine_of(family), drafter)
    return [e.token for e in decoder.generate(prompt, max_tokens=8)], decoder.stats


@cache
def lines_of_a_turn(family):
    # Once the capacity has grown, every run has the same lines.
    for _ in range(2):
        engine_of(family).reset(0)
        emissions = begin(family, PROMPT)
        with interruptions() as counted:
            list(emissions)
    return counted.lines


@pytest.mark.parametrize("family", FAMILIES)
def test_ctrl_c_at_any_line_leaves_the_next_turn_right(family):
    lines = lines_of_a_turn(family)
    assert lines > 500
    # Another line in every stretch, so that all of a round's are met somewhere.
    step = 1 if PROFILE == "deep" else 29
    stopped = set()
    for line in range(1, lines + 1, step):
        engine_of(family).reset(0)
        emissions = begin(family, PROMPT)
        emitted = []
        with pytest.raises(KeyboardInterrupt), interruptions([line]):
            taken_from(emissions, emitted)
        stopped.add(len(emitted))
        tokens, _ = next_turn(family, emitted)
        assert tokens == plain_following(family, len(emitted)), line
    assert len(stopped) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_ctrl_c_at_any_line_of_plain_decoding_leaves_no_step_under_way_for_another_text(family):
    """A prompt that only differs before the end is the one that such a step would fit."""
    engine = engine_of(family)

    def begin():
        engine.reset(0)
        return SpeculativeDecoder(engine).generate(PROMPT[:6], max_tokens=6)

    for _ in range(2):
        emissions = begin()
        with interruptions() as counted:
            said = [e.token for e in emissions]
    texts = {}
    for line in range(1, counted.lines + 1, 1 if PROFILE == "deep" else 13):
        emissions, emitted = begin(), []
        with pytest.raises(KeyboardInterrupt), interruptions([line]):
            taken_from(emissions, emitted)
        # The text so far is kept, and another token takes the place of the newest.
        before = [*PROMPT[:6], *said[: len(emitted)]]
        prompt = (*before[:-1], before[-1] + 1, *said[len(emitted) : len(emitted) + 1])
        decoder = SpeculativeDecoder(engine)
        tokens = [e.token for e in decoder.generate(prompt, max_tokens=5)]
        if prompt not in texts:
            engine.reset(0)
            texts[prompt] = [
                e.token for e in SpeculativeDecoder(engine).generate(prompt, max_tokens=5)
            ]
        assert tokens == texts[prompt], line
    assert len(texts) > 4


def test_ctrl_c_at_any_line_of_a_draft_model_leaves_the_next_turn_right():
    """Its own state too: a model that drafts for itself is still right in the next turn."""
    model, engine = model_of("llama"), engine_of("llama")

    def begin():
        engine.reset(0)
        drafter = DraftModel(model, max_context_length=100, tile_widths=(1, 2, 4, 8))
        # It is kept with the model, and would find the prompt in there.
        drafter.engine.reset(0)
        return drafter, SpeculativeDecoder(engine, drafter).generate(PROMPT, max_tokens=COUNT)

    for _ in range(2):
        with interruptions() as counted:
            list(begin()[1])
    interrupted = 0
    for line in range(1, counted.lines + 1, 1 if PROFILE == "deep" else 151):
        drafter, emissions = begin()
        emitted = []
        # How often a draft is waited for depends on the clock, so the last lines may be missing.
        with suppress(KeyboardInterrupt), interruptions([line]):
            taken_from(emissions, emitted)
            continue
        interrupted += 1
        prompt = following(PROMPT, emitted)
        decoder = SpeculativeDecoder(engine, drafter)
        tokens = [e.token for e in decoder.generate(prompt, max_tokens=8)]
        assert tokens == plain_following("llama", len(emitted)), line
        assert decoder.stats.acceptance_rate == 1, line
    assert interrupted > (500 if PROFILE == "deep" else 5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
def test_a_processor_that_raises_ends_the_turn_where_the_text_ends(family, count):
    def fails(tokens, logits):
        if len(tokens) == len(PROMPT) + count:
            raise ArithmeticError("of the caller's own")
        return logits

    engine = engine_of(family)
    engine.reset(0)
    steps = mlxspec.generate_step(
        PROMPT,
        model_of(family),
        engine=engine,
        drafter=drafter_of(family, PROMPT),
        logits_processors=[fails],
    )
    emitted = []
    with pytest.raises(ArithmeticError, match="caller's own"):
        taken_from(steps, emitted)
    assert len(emitted) == count
    assert list(engine.tokens) == [*PROMPT, *emitted[:-1]]
    tokens, stats = next_turn(family, emitted)
    assert tokens == plain_following(family, count)
    assert stats.reused_tokens == len(PROMPT) + count - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_limit_and_a_stop_token_end_a_turn_where_a_closed_generator_does(family):
    text = plain_text(family, tuple(PROMPT))
    for count in (1, 3, 8, 9):
        for ending in ({"max_tokens": count}, {"stop_tokens": [text[count - 1]]}):
            engine = engine_of(family)
            engine.reset(0)
            decoder = SpeculativeDecoder(engine, drafter_of(family, PROMPT))
            emitted = [e.token for e in decoder.generate(PROMPT, **ending)]
            if "max_tokens" in ending:
                assert len(emitted) == count
            assert list(engine.tokens) == [*PROMPT, *emitted[:-1]]
            tokens, _ = next_turn(family, emitted)
            assert tokens == plain_following(family, len(emitted))


def test_after_a_stop_string_the_next_turn_goes_on_from_what_was_emitted():
    tokenizer = byte_level_tokenizer()
    said = "one two STOP three four five"
    prompt, second = ids_of(tokenizer, "say: "), ids_of(tokenizer, " and then? ")
    shown = ids_of(tokenizer, said[: said.index("STOP") + 4])
    script = [*prompt, *shown, *second, *ids_of(tokenizer, "that was all")]
    engine = ScriptedEngine(script, len(tokenizer))
    drafter = PlannedDrafter(script, [("right", 7)], len(tokenizer))
    options = {"engine": engine, "drafter": drafter}
    responses = list(
        mlxspec.stream_generate(no_model(), tokenizer, prompt, stop_strings=["STOP"], **options)
    )
    emitted = [r.token for r in responses]
    assert emitted == shown
    assert responses[-1].finish_reason == "stop"
    assert list(engine.tokens) == [*prompt, *emitted[:-1]]
    stats = SpeculationStats()
    text = mlxspec.generate(
        no_model(), tokenizer, [*prompt, *emitted, *second], max_tokens=12, stats=stats, **options
    )
    assert text == "that was all"
    assert stats.reused_tokens == len(prompt) + len(emitted) - 1
    assert stats.lost_tokens == 0
    assert f"Turns: {stats.reused_tokens} of {stats.prompt_tokens} prompt" in stats.summary()


def no_model():
    """What the scripted engine has in place of one."""
    return nn.Module()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_could_not_be_kept_is_counted_and_said(family):
    engine = engine_of(family)
    engine.reset(0)
    long = prompt_of(60)
    stats = SpeculationStats()
    for prompt in (long, [*long[:30], 7, 8]):
        list(mlxspec.generate_step(prompt, model_of(family), engine=engine, stats=stats))[:3]
    kept = 30 if family == "llama" else 0
    assert (stats.reused_tokens, stats.lost_tokens) == (kept, 30 - kept)
    assert ("30 processed again" in stats.summary()) == (family == "gemma3_text")


def test_an_engine_kept_with_the_model_begins_every_sequence_anew():
    """Two callers who never met must not find each other's text in the figures, or its rounding."""
    model, stats = model_of("llama"), SpeculationStats()
    for _ in range(2):
        list(mlxspec.generate_step(PROMPT, model, max_tokens=3, stats=stats))
    assert (stats.reused_tokens, stats.prompt_tokens) == (0, 2 * len(PROMPT))
    engine = engine_of("llama")
    engine.reset(0)
    for _ in range(2):
        list(mlxspec.generate_step(PROMPT, model, max_tokens=3, stats=stats, engine=engine))
    assert stats.reused_tokens == len(PROMPT) - 1


def test_progress_counts_what_has_to_be_processed():
    engine = engine_of("llama")
    engine.reset(0)
    for prompt, expected in ((PROMPT, 21), ([*PROMPT, 1, 2, 3], 3)):
        calls = []
        list(
            mlxspec.generate_step(
                prompt,
                model_of("llama"),
                max_tokens=1,
                engine=engine,
                prompt_progress_callback=lambda *call, calls=calls: calls.append(call),
            )
        )
        assert {total for _, total in calls} == {expected}
        assert calls[-1][0] == expected - 1


class _CountsResets(PromptLookup):
    resets = 0

    def reset(self):
        self.resets += 1
        super().reset()


def test_a_drafter_whose_text_goes_on_is_not_emptied_and_any_other_is():
    engine = engine_of("llama")
    engine.reset(0)
    drafter = _CountsResets(min_ngram=1)
    decoder = SpeculativeDecoder(engine, drafter)
    resets = drafter.resets

    def turn(prompt):
        return [e.token for e in decoder.generate(prompt, max_tokens=5)]

    prompt = [*PROMPT, PROMPT[0]]
    first = turn(prompt)
    assert drafter.resets == resets + 1
    turn([*prompt, *first, *PROMPT[:3]])
    assert drafter.resets == resets + 1
    # It has seen the whole history: what stood in the first turn is proposed after the second.
    assert drafter.propose([*engine.tokens, 0, *PROMPT[5:9]], 2) == PROMPT[9:11]
    turn([*engine.tokens[:10], 3, 4])
    assert drafter.resets > resets + 1


def test_a_drafter_is_emptied_when_somebody_else_used_the_engine():
    engine = engine_of("llama")
    engine.reset(0)
    drafter = _CountsResets(min_ngram=1)
    decoder = SpeculativeDecoder(engine, drafter)
    emitted = [e.token for e in decoder.generate(PROMPT, max_tokens=5)]
    resets = drafter.resets
    engine.reset(10)
    engine.prefill(prompt_of(30, seed=8))
    list(decoder.generate([*PROMPT, *emitted, 5], max_tokens=2))
    assert drafter.resets == resets + 1


class _OnlyCountsResets:
    """Unlike lookup, it does not notice by itself that another text has begun."""

    resets = 0

    def propose(self, history, budget):
        return [1] * budget

    def commit(self, length):
        pass

    def reset(self):
        self.resets += 1


@pytest.mark.parametrize("between", ["nothing", "another text", "a text of somebody else's"])
def test_a_drafter_that_trusts_what_it_was_shown_is_emptied_when_that_is_the_text_no_more(between):
    engine, drafter = engine_of("llama"), _OnlyCountsResets()
    engine.reset(0)
    decoder = SpeculativeDecoder(engine, drafter)
    emitted = [e.token for e in decoder.generate(PROMPT, max_tokens=5)]
    resets, prompt = drafter.resets, [*PROMPT, *emitted, 5]
    if between == "another text":
        prompt = [*PROMPT[:10], *prompt_of(30, seed=8)]
    if between == "a text of somebody else's":
        # All of the prompt that follows is held, and nothing of it was shown.
        prompt = prompt_of(40, seed=8)
        engine.reset(0)
        engine.prefill(prompt)
    list(decoder.generate(prompt, max_tokens=2))
    assert drafter.resets == resets + (between != "nothing")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_the_dynamic_engine_reuses_what_its_caches_can_give_back(family):
    engine, fresh = (DynamicShapeEngine(model_of(family), max_context_length=100) for _ in "ab")
    stats = SpeculationStats()

    def turn(engine, prompt, stats=None):
        decoder = SpeculativeDecoder(engine, stats=stats)
        return [e.token for e in decoder.generate(prompt, max_tokens=6)]

    first = turn(engine, PROMPT)
    for prompt, reused in (
        ([*PROMPT, *first, 5, 6], len(PROMPT) + 5),
        ([*PROMPT, 9], len(PROMPT) if family == "llama" else 0),
    ):
        before = stats.reused_tokens
        fresh.reset(0)
        assert turn(engine, prompt, stats) == turn(fresh, prompt)
        assert stats.reused_tokens - before == reused


def test_rows_of_a_reused_prefix_are_those_of_the_first_time():
    engine, rows = engine_of("llama"), []
    engine.reset(0)
    for _ in range(2):
        steps = mlxspec.generate_step(PROMPT, model_of("llama"), max_tokens=9, engine=engine)
        rows.append(np.stack([exact(logprobs) for _, logprobs, _ in steps]))
    assert np.array_equal(*rows)
