"""The real Gemma 3 270M past its sliding window: whatever is drafted, its text is plain decoding's.

The prompt alone fills the window of 512, so that every draft is verified past it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mlxspec
from mlxspec import PromptLookup, SpeculationStats, StaticShapeEngine
from tests.hostile import PlannedDrafter

TEXT = Path(__file__).parents[2] / "bench" / "texts" / "gemma_window.txt"
WIDTHS = (1, 2, 4, 8)
# Wrong at the first row of a block, in its middle, and at its end.
IMPERFECT = [("wrong", 7), ("right then wrong", 6), ("wrong then right", 3), ("right", 5)] + [
    ("right then wrong", 1 + 2 * k) for k in range(4)
]


def prompt_past_the_window(model, tokenizer, length):
    prompt = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:length]
    assert len(prompt) == length > model.args.sliding_window == 512
    return prompt


def said(model, engine, prompt, count, drafter=None):
    """What is generated, and what speculation did for it."""
    stats = SpeculationStats()
    steps = mlxspec.generate_step(
        prompt, model, engine=engine, drafter=drafter, max_tokens=count, stats=stats
    )
    return [token for token, _, _ in steps], stats


def test_drafts_past_the_window_do_not_change_a_short_text(demo):
    """Nearly all of its half a minute is one prefill, the shortest that fills the window."""
    model, tokenizer = demo("gemma3:bf16")
    prompt = prompt_past_the_window(model, tokenizer, 513)
    engine = StaticShapeEngine(model, max_context_length=768, tile_widths=WIDTHS)
    plain, _ = said(model, engine, prompt, 8)
    plan = [("wrong", 3), ("right", 1), ("right then wrong", 3), ("right", 3)]
    drafter = PlannedDrafter(prompt + plain, plan, engine.vocab_size)
    drafted, stats = said(model, engine, prompt, 8, drafter)
    assert drafted == plain
    assert stats.reused_tokens == len(prompt) - 1
    assert (stats.drafted, stats.accepted) == (3 + 1 + 3 + 2, 0 + 1 + 1 + 2)
    assert stats.forwards == stats.rounds == 4


@pytest.fixture(scope="module")
def plain_long():
    """An engine of its own per prompt, and what it says plainly: made once, as it takes minutes."""
    made: dict[str, object] = {}

    def get(model, prompt):
        if not made:
            engine = StaticShapeEngine(model, max_context_length=1024, tile_widths=WIDTHS)
            made["engine"], made["plain"] = engine, said(model, engine, prompt, 200)[0]
        return made["engine"], made["plain"]

    return get


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["lookup", "right", "imperfect"])
def test_drafts_past_the_window_do_not_change_a_long_text(demo, plain_long, kind):
    """Minutes on a CPU."""
    model, tokenizer = demo("gemma3:bf16")
    prompt = prompt_past_the_window(model, tokenizer, 700)
    engine, plain = plain_long(model, prompt)
    assert len(plain) == 200
    drafter = {
        "lookup": PromptLookup(),
        "right": PlannedDrafter(prompt + plain, [("right", 7)], engine.vocab_size),
        "imperfect": PlannedDrafter(prompt + plain, IMPERFECT, engine.vocab_size),
    }[kind]
    drafted, stats = said(model, engine, prompt, 200, drafter)
    assert drafted == plain
    assert stats.accepted >= {"lookup": 100, "right": 170, "imperfect": 60}[kind]
    assert (stats.accepted == stats.drafted) == (kind == "right")
    assert stats.forwards == stats.rounds == 200 - stats.accepted
