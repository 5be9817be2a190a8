"""Recurrent and convolutional models: rejected rows leave no trace in the state."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxspec import Capture, RewindRefused, StaticShapeEngine
from mlxspec.engine import support
from mlxspec.engine.support import STATIC_FAMILIES, default_placement, family_of, model_from_config
from tests.cases import PLANS, decode, exact, mlx_lm_tokens, prompt_of
from tests.conftest import PROFILE
from tests.families.tiny import tiny_configs, tiny_model
from tests.hostile import PlannedDrafter
from tests.rings.test_window_models import snapshot

COUNT = 40
PROMPT = 11
LADDER = {"anchored": (1, 2, 4, 8), "aligned": (8,)}


def _recurrent_models():
    for name, config in tiny_configs().items():
        model = model_from_config(config)
        if family_of(model) in STATIC_FAMILIES and support.why_not_static(model) is None:
            placement = default_placement(model)
            if placement != "free":
                yield name, placement


MODELS = dict(_recurrent_models())
ANCHORED = sorted(name for name, placement in MODELS.items() if placement == "anchored")
# What may be anchored may be aligned too; in the fast profile one such model stands for all.
ALIGNED_TOO = ANCHORED if PROFILE == "deep" else ["lfm2"]
SETUPS = [*MODELS.items(), *((name, "aligned") for name in ALIGNED_TOO)]
# On the way are a short convolution, a delta rule, a state space and rings beside a recurrence.
FEW = [("lfm2", "anchored"), ("qwen3_next", "anchored"), ("mamba2", "aligned")]


@pytest.fixture(autouse=True)
def uncompiled_but_for_a_few(request):
    """Run the graphs of most families as they are: fused kernels of all take minutes to compile."""
    arguments = getattr(request.node, "callspec", None)
    name = arguments and arguments.params.get("name")
    if PROFILE == "deep" or name is None or name in dict(FEW):
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def model_of(name):
    return tiny_model(name)


@cache
def engine_of(name, placement):
    return StaticShapeEngine(
        model_of(name),
        max_context_length=PROMPT + 2 * COUNT,
        tile_widths=LADDER[placement],
        placement=placement,
        prefill_step_size=16,
        span_step=32,
    )


@cache
def plain(name, placement):
    """Ids and rows of decoding without drafts."""
    engine, prompt = engine_of(name, placement), prompt_of(PROMPT)
    engine.reset(0)
    engine.prefill(prompt[:-1])
    token, tokens, rows = prompt[-1], [], []
    for _ in range(COUNT):
        row = engine.verify([token], Capture(logits=True))
        token = row.argmax[0]
        tokens.append(token)
        rows.append(exact(row.logits)[0])
    return tokens, np.stack(rows)


def test_every_recurrent_family_is_here():
    families = {family_of(model_from_config(tiny_configs()[name])) for name in MODELS}
    assert families >= {
        "qwen3_next", "qwen3_5", "lfm2", "mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid",
        "jamba", "rwkv7", "recurrent_gemma",
    }  # fmt: skip
    assert tiny_configs()["lfm2"]["conv_L_cache"] > 2


@pytest.mark.parametrize(("name", "placement"), SETUPS)
def test_plain_ids_are_mlx_lms(name, placement):
    assert plain(name, placement)[0] == mlx_lm_tokens(model_of(name), prompt_of(PROMPT), COUNT)


@pytest.mark.parametrize("name", ANCHORED)
def test_rows_and_states_of_an_anchored_family_are_equal_in_every_width(name):
    """What `_ANCHORED_FAMILIES` says. Where it does not hold, a model must be aligned."""
    widths = range(1, 17) if PROFILE == "deep" else (1, 2, 3, 8)
    text, start, count = prompt_of(30), 5, widths[-1]
    engine = StaticShapeEngine(
        model_of(name), max_context_length=64, tile_widths=tuple(widths), placement="anchored"
    )
    assert engine.tile_widths == tuple(widths)
    rows, states = None, None
    for width in widths:
        engine.reset(0)
        engine.prefill(text[:start])
        ours, after = [], {}
        for position in range(start, start + count - width + 1, width):
            block = engine.verify(text[position : position + width], Capture(logits=True))
            ours.append(exact(block.logits))
            after[position + width] = [exact(a) for a in engine._state.checkpoints[-1].arrays]
        ours = np.concatenate(ours)
        if rows is None:
            rows, states = ours, after
        assert np.array_equal(ours, rows[: len(ours)]), f"width {width}"
        for position, arrays in after.items():
            assert engine._state.position > start
            for a, b in zip(arrays, states[position], strict=True):
                assert np.array_equal(a, b), f"width {width}, state at {position}"


def test_a_family_with_other_rows_in_other_widths_is_not_anchored():
    """The measurement can tell: mamba2 computes one row in another way than several."""
    with pytest.raises(AssertionError):
        test_rows_and_states_of_an_anchored_family_are_equal_in_every_width("mamba2")
    assert default_placement(model_of("mamba2")) == "aligned"


@pytest.mark.parametrize(("name", "placement"), SETUPS)
def test_a_block_rejected_at_any_row_leaves_no_trace(name, placement):
    """Right up to a row, wrong from there on: the rows that follow are those of plain decoding."""
    engine, prompt = engine_of(name, placement), prompt_of(PROMPT)
    tokens, rows = plain(name, placement)
    text, first = prompt + tokens, PROMPT - 1
    engine.reset(0)
    engine.prefill(prompt[:-1])
    cursor = first
    for keep in [1, 2, 3, 4, 5, 6, 7, 1, 4]:
        length = engine.one_forward_draft_budget + 1
        keep = min(keep, length)
        wrong = [(token + 1) % 97 + 1 for token in text[cursor + keep : cursor + length]]
        block = engine.verify(text[cursor : cursor + keep] + wrong, Capture(logits=True))
        assert block.forwards == 1
        at = slice(cursor - first, cursor - first + keep)
        assert np.array_equal(exact(block.logits)[:keep], rows[at])
        cursor += keep
        engine.reset(cursor)
    again = engine.verify(text[cursor : cursor + 2], Capture(logits=True)).logits
    assert np.array_equal(exact(again), rows[cursor - first : cursor - first + 2])


@pytest.mark.parametrize(("name", "placement"), SETUPS)
def test_a_consumer_may_stop_after_any_row_of_a_block(name, placement):
    """All rows are right and the state is adopted; then only some of them turn out to be used."""
    engine, prompt = engine_of(name, placement), prompt_of(PROMPT)
    tokens, rows = plain(name, placement)
    text, first = prompt + tokens, PROMPT - 1
    # Cursors at which a block of several rows fits; the one of aligned tiles begins at 16.
    cursor = 16
    for used in range(1, 9):
        engine.reset(0)
        engine.prefill(prompt[:-1])
        while engine.processed_token_count < cursor:
            engine.verify([text[engine.processed_token_count]])
        engine.verify(text[cursor : cursor + 8])
        engine.reset(cursor + 8)
        engine.reset(cursor + used)
        for position in range(cursor + used, cursor + used + 3):
            row = engine.verify([text[position]], Capture(logits=True))
            assert np.array_equal(exact(row.logits)[0], rows[position - first]), used


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("name", "placement"), SETUPS if PROFILE == "deep" else FEW)
def test_no_drafter_changes_a_token_and_a_verify_is_one_forward(name, placement, plan):
    engine, prompt, tokens = (
        engine_of(name, placement),
        prompt_of(PROMPT),
        plain(name, placement)[0],
    )
    for k in range(1, 16) if PROFILE == "deep" else (1, 3, 7):
        drafter = PlannedDrafter(prompt + tokens, PLANS[plan], engine.vocab_size)
        ours, stats = decode(engine, prompt, COUNT, drafter, num_draft_tokens=k)
        assert ours == tokens
        assert stats.forwards == stats.rounds
        if plan == "right":
            assert stats.acceptance_rate == 1


@pytest.mark.parametrize(("name", "placement"), FEW)
def test_a_refused_rewind_changes_no_layer(name, placement):
    engine, text = engine_of(name, placement), prompt_of(60)
    engine.reset(0)
    engine.prefill(text[:20])
    for position in range(20, 60, 4):
        engine.verify(text[position : position + 4])
    before = snapshot(engine)
    # Held are: the beginning, the prompt's end, and the last block.
    prompt_end = {"anchored": 20, "aligned": 16}[placement]
    held = {*range(8), *range(prompt_end, prompt_end + 8), *range(56, 61)}
    for to in range(61):
        assert engine.allows_rewind(to) == (to in held), to
        if to not in held:
            with pytest.raises(RewindRefused, match="recurrent state only that after"):
                engine.reset(to)
    assert snapshot(engine) == before


@pytest.mark.parametrize(("name", "placement"), FEW)
def test_the_prompts_end_is_a_checkpoint_for_the_next_answer(name, placement):
    engine, prompt, (tokens, rows) = (
        engine_of(name, placement), prompt_of(PROMPT), plain(name, placement)
    )  # fmt: skip
    engine.reset(0)
    engine.prefill(prompt[:-1])
    for token in prompt_of(30, seed=1):
        engine.verify([token])
    assert engine.allows_rewind(PROMPT - 1)
    engine.reset(PROMPT - 1)
    text = prompt + tokens
    for position in range(PROMPT - 1, PROMPT + 12):
        row = engine.verify([text[position]], Capture(logits=True))
        assert np.array_equal(exact(row.logits)[0], rows[position - PROMPT + 1])


@pytest.mark.parametrize(("name", "placement"), FEW)
def test_the_next_turn_does_not_tell_how_much_was_drafted(name, placement):
    """A turn, then prefill: the rows after it are bit for bit the same with and without drafts."""
    prompt, tokens = prompt_of(PROMPT), plain(name, placement)[0][:17]
    engine, rows = engine_of(name, placement), []
    for plan in (None, "right", "noisy", "wrong"):
        drafter = plan and PlannedDrafter(prompt + tokens, PLANS[plan], engine.vocab_size)
        assert decode(engine, prompt, 17, drafter, num_draft_tokens=5)[0] == tokens
        engine.prefill(prompt_of(21, seed=2))
        rows.append(engine.verify([3, 4], Capture(logits=True)).logits)
    assert all(mx.array_equal(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize(("name", "placement"), FEW)
def test_a_failing_prefill_leaves_the_turn_before_as_it_was(name, placement):
    prompt, (tokens, rows) = prompt_of(PROMPT), plain(name, placement)
    text, engine = prompt + tokens, engine_of(name, placement)
    engine.reset(0)
    engine.prefill(prompt[:-1])
    for position in range(PROMPT - 1, PROMPT + 12):
        engine.verify([text[position]])

    def stop(processed, total):
        if processed > 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(prompt_of(40, seed=3), stop)
    assert list(engine.tokens) == text[: PROMPT + 12]
    for position in range(PROMPT + 12, PROMPT + 16):
        row = engine.verify([text[position]], Capture(logits=True))
        assert np.array_equal(exact(row.logits)[0], rows[position - PROMPT + 1])


@pytest.mark.parametrize(("name", "placement"), [*FEW, ("lfm2", "aligned")])
def test_budgets_hold_at_every_cursor_and_no_tile_crosses_a_span(name, placement):
    n, span = 45, 16
    widths = LADDER[placement]
    engine = StaticShapeEngine(
        model_of(name),
        max_context_length=n,
        tile_widths=widths,
        placement=placement,
        span_step=span,
    )
    text = prompt_of(n)
    tiles = []
    forward = engine._forward

    def recording(start, rows, *rest, **options):
        tiles.append((start, rows))
        return forward(start, rows, *rest, **options)

    engine._forward = recording
    engine.prefill(text[:1])
    for cursor in range(1, n - 1):
        budget = engine.one_forward_draft_budget
        if placement == "aligned":
            assert budget == min(7 - cursor % 8, n - 2 - cursor)
        else:
            room = span - cursor % span
            widest = max(width for width in widths if width <= room)
            assert budget == min(widest - 1, n - 2 - cursor)
        assert engine.max_verify_block_length == n - 1 - cursor
        assert engine.verify(text[cursor : cursor + budget + 1]).forwards == 1
        engine.reset(cursor)
        longer = text[cursor : cursor + budget + 2]
        if len(longer) <= engine.max_verify_block_length:
            assert engine.verify(longer).forwards == 2
            engine.reset(cursor)
        engine.verify(text[cursor : cursor + 1])
    assert tiles
    assert all(start // span == (start + rows - 1) // span for start, rows in tiles)


@pytest.mark.parametrize("widths", [(2, 4, 8), (4, 8)])
def test_an_anchored_ladder_need_not_begin_at_one(widths):
    """The prompt may then end inside a tile; every limit is met exactly all the same."""
    engine = StaticShapeEngine(
        model_of("lfm2"),
        max_context_length=80,
        tile_widths=widths,
        placement="anchored",
        span_step=16,
    )
    for length in (1, 2, 3, 15, 16, 17):
        expected = mlx_lm_tokens(model_of("lfm2"), prompt_of(length), COUNT)
        for plan in PLANS:
            drafter = PlannedDrafter(prompt_of(length) + expected, PLANS[plan], engine.vocab_size)
            ours, stats = decode(engine, prompt_of(length), COUNT, drafter)
            assert ours == expected
            assert stats.forwards == stats.rounds


@pytest.mark.parametrize(("name", "placement"), FEW)
def test_a_device_that_fails_empties_the_engine_and_a_new_text_is_right(
    name, placement, monkeypatch
):
    """What it has computed is gone; the engine says so, and begins anew without a trace of it."""
    engine, prompt, (tokens, rows) = (
        engine_of(name, placement),
        prompt_of(PROMPT),
        plain(name, placement),
    )
    for call in (engine.prefill, engine.verify):
        engine.reset(0)
        engine.prefill(prompt_of(21, seed=4))
        evaluate, failures = mx.eval, iter([RuntimeError("the device is lost")])

        def failing(*arrays, evaluate=evaluate, failures=failures):
            for failure in failures:
                raise failure
            evaluate(*arrays)

        with monkeypatch.context() as patched:
            patched.setattr(mx, "eval", failing)
            with pytest.raises(RuntimeError, match=r"engine was emptied.*device is lost"):
                call(prompt_of(8, seed=5))
        assert engine.processed_token_count == 0
        assert list(engine.tokens) == []
        engine.prefill(prompt[:-1])
        row = engine.verify([prompt[-1]], Capture(logits=True))
        assert np.array_equal(exact(row.logits)[0], rows[0])
        assert row.argmax == tokens[:1]
