"""Turns: after a stop at any row of a block the next turn is plain decoding's, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxspec import (
    DraftModel,
    PromptLookup,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    StaticShapeEngine,
)
from mlxspec.decoding.acceptance import ModelsChoice
from tests.cases import exact, prompt_of, varied_model
from tests.conftest import PROFILE
from tests.hostile import PlannedDrafter

WINDOW = 16
WIDE = {"hidden_size": 128, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """A model, and how its keys are kept."""

    family: str
    changes: dict = field(default_factory=dict, hash=False)
    placement: str | None = None
    kv_start: int | None = None

    def __str__(self):
        kv = "" if self.kv_start is None else f" kv {self.kv_start}"
        return f"{self.family} {self.placement or ''}{kv}".strip()


CASES = [
    Case("llama"),
    Case("llama", WIDE, kv_start=0),
    Case("llama", WIDE, kv_start=24),
    Case("gemma3_text", {"sliding_window": WINDOW}),
    Case("gemma4_text"),
    Case("lfm2"),
    Case("lfm2", {"hidden_size": 128, "block_dim": 128}, kv_start=24),
    Case("qwen3_next"),
    Case("qwen3_next", WIDE, kv_start=24),
    Case("mamba2", placement="aligned"),
]
WITH_ANOTHER = (Case("llama"), Case("gemma3_text", {"sliding_window": WINDOW}), Case("lfm2"))
LONGEST = 10
# How the next prompt goes on: from the whole answer, from a part of it, without it.
FOLLOWINGS = {"all": 0, "cut": 2, "again": 1000}


@pytest.fixture(autouse=True)
def uncompiled(request):
    """Turns are about which forwards run; fused kernels of every family take minutes to compile."""
    if PROFILE == "deep":
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def engine_of(case, which):
    aligned = case.placement == "aligned"
    quantisation = {}
    if case.kv_start is not None:
        quantisation = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": case.kv_start}
    return StaticShapeEngine(
        varied_model(case.family, **case.changes),
        max_context_length=160,
        tile_widths=(8,) if aligned else (1, 2, 4, 8),
        placement=case.placement,
        prefill_step_size=16,
        span_step=32,
        **quantisation,
    )


def turn(engine, prompt, count, drafter=None):
    """Emit `count` tokens and stop there, though more were wanted; tokens, rows, counters."""
    decoder = SpeculativeDecoder(
        engine,
        drafter,
        SpeculativeDecodingOptions(7),
        acceptance=ModelsChoice(with_logprobs=True),
    )
    emissions = decoder.generate(prompt, max_tokens=count + 20)
    tokens, rows = [], []
    for emission in emissions:
        tokens.append(emission.token)
        rows.append(exact(emission.logprobs))
        if len(tokens) == count:
            break
    emissions.close()
    return tokens, np.stack(rows), decoder.stats


def next_prompt(prompt, answer, cut, number):
    """The prompt, the answer but for its last `cut` tokens, and what is said next: a repetition."""
    kept = answer[: max(0, len(answer) - cut)]
    return [*prompt, *kept, *prompt_of(21)[number : number + 3]]


@cache
def plain_turns(case, count, cut):
    """Three turns without drafts: (prompt, tokens, rows, reused tokens) of each."""
    engine = engine_of(case, "plain")
    engine.reset(0)
    prompt, turns = prompt_of(21), []
    for number in range(3):
        tokens, rows, stats = turn(engine, prompt, count)
        turns.append((prompt, tokens, rows, stats.reused_tokens))
        prompt = next_prompt(prompt, tokens, cut, number)
    return turns


@cache
def oracle(case, prompt, count):
    """Plain decoding's text from the prompt on, `count` tokens; right enough to draft from."""
    engine = engine_of(case, "oracle")
    engine.reset(0)
    return turn(engine, list(prompt), count)[0]


@pytest.mark.parametrize("following", FOLLOWINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_turns_after_a_stop_at_every_row_of_a_block_are_plains(case, following):
    cut = FOLLOWINGS[following]
    accepted = 0
    every = following == "all" or PROFILE == "deep"
    for count in range(1, LONGEST) if every else (3, 8):
        engine = engine_of(case, "drafted")
        engine.reset(0)
        for prompt, tokens, rows, reused in plain_turns(case, count, cut):
            plan = [("right", 7)] if count % 2 else [("right", 7), ("right then wrong", 6)]
            text = prompt + oracle(case, tuple(prompt), LONGEST + 8)
            drafter = PlannedDrafter(text, plan, engine.vocab_size)
            ours, our_rows, stats = turn(engine, prompt, count, drafter)
            assert ours == tokens
            assert np.array_equal(our_rows, rows)
            assert stats.reused_tokens == reused
            accepted += stats.accepted
            # The state covers what was emitted but for the newest token.
            assert list(engine.tokens) == prompt + tokens[:-1]
    assert accepted > (60 if every else 15)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_drafted_by_lookup_are_plains(case):
    engine, drafted = engine_of(case, "drafted"), 0
    for count in (1, 4, 9):
        engine.reset(0)
        drafter = PromptLookup(min_ngram=1)
        for prompt, tokens, rows, reused in plain_turns(case, count, 0):
            ours, our_rows, stats = turn(engine, prompt, count, drafter)
            assert ours == tokens
            assert np.array_equal(our_rows, rows)
            assert stats.reused_tokens == reused
            drafted += stats.drafted
    assert drafted


@pytest.mark.parametrize(
    ("case", "drafting"),
    [(case, "itself") for case in CASES]
    + [
        pytest.param(case, "another", marks=() if case in WITH_ANOTHER else pytest.mark.deep)
        for case in CASES
    ],
    ids=str,
)
def test_turns_drafted_by_a_model_are_plains(case, drafting):
    """Drafts all right, or hardly ever; the draft model's own state follows from turn to turn."""
    model = varied_model(case.family, **case.changes)
    aligned = case.placement == "aligned"
    if drafting == "another":
        model, aligned = varied_model("qwen2"), False
    drafter = DraftModel(
        model, max_context_length=160, tile_widths=(8,) if aligned else (1, 2, 4, 8)
    )
    engine, drafted, accepted = engine_of(case, "drafted"), 0, 0
    every = (drafting == "itself" and case == Case("lfm2")) or PROFILE == "deep"
    for count in range(1, LONGEST) if every else (3, 8):
        engine.reset(0)
        for prompt, tokens, rows, reused in plain_turns(case, count, 0):
            ours, our_rows, stats = turn(engine, prompt, count, drafter)
            assert ours == tokens
            assert np.array_equal(our_rows, rows)
            assert stats.reused_tokens == reused
            drafted += stats.drafted
            accepted += stats.accepted
    assert drafted > 20
    # Of a block that is not wanted to its end, what is left does not count as accepted.
    assert (accepted > 20) == (drafting == "itself")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_turn_that_goes_on_reuses_all_that_was_there(case):
    for count in (1, 5, 8):
        for number, (prompt, _, _, reused) in enumerate(plain_turns(case, count, 0)):
            assert reused == (0 if number == 0 else len(prompt) - 3 - 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_second_turn_says_what_a_fresh_run_of_its_prompt_says(case):
    """Equal bit for bit under full attention; elsewhere the rows differ by rounding alone."""
    fresh = engine_of(case, "fresh")
    for count in (3, 8):
        for prompt, tokens, rows, _ in plain_turns(case, count, 0)[1:]:
            fresh.reset(0)
            theirs, their_rows, _ = turn(fresh, prompt, count)
            if case.family == "llama" and case.kv_start is None:
                assert tokens == theirs
                assert np.array_equal(rows, their_rows)
                continue
            same = next((i for i in range(count) if tokens[i] != theirs[i]), count - 1) + 1
            tolerance = 1e-4 if case.kv_start is None else 0.3
            margin = np.abs(rows[:same] - their_rows[:same]).max()
            assert margin < tolerance, margin


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_after_a_drafted_turn_is_plains_to_the_last_bit(case):
    """Every key that a later token can see, and the recurrent state at the next prompt's start."""
    for count in (3, 8, 9):
        states = []
        for which in ("plain", "drafted"):
            engine = engine_of(case, which)
            engine.reset(0)
            prompt = prompt_of(21)
            drafter = None
            if which == "drafted":
                text = prompt + oracle(case, tuple(prompt), LONGEST + 8)
                drafter = PlannedDrafter(
                    text, [("right", 3), ("right then wrong", 6)], engine.vocab_size
                )
            turn(engine, prompt, count, drafter)
            engine.prefill([])
            states.append(visible_state(engine))
        assert len(states[0]) == len(states[1]) > 2
        for ours, theirs in zip(*states, strict=True):
            assert np.array_equal(ours, theirs)


def visible_state(engine):
    """What the tokens to come can see of keys, values and recurrent states."""
    state, cursor = engine._state, engine.processed_token_count
    arrays = list(state.checkpoints[-1].arrays)
    layers = state.layout.layer_of_each_array
    for layer, array in zip(layers, state.slots, strict=True):
        rule = getattr(layer, "rule", None)
        if rule is None:
            arrays.append(array[:, :, :cursor])
        else:
            seen = [k % rule.depth for k in range(max(0, cursor - rule.window + 1), cursor)]
            arrays.append(array[:, :, mx.array(seen)])
    return [exact(array) for array in arrays] + [np.array(state.position)]
