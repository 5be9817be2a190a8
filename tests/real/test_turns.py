"""Turns of real models: with drafts as without, and over a file as without one."""

from __future__ import annotations

import numpy as np
import pytest

from mlxspec import (
    PromptLookup,
    SpeculativeDecoder,
    StaticShapeEngine,
    load_prompt_cache,
    save_prompt_cache,
)
from mlxspec.decoding.acceptance import ModelsChoice
from tests.cases import exact

FIRST = "Repeat: apple, banana, cherry, apple, banana, cherry, apple, banana,"
SECOND = " cherry. And once more, from the beginning: apple, banana,"


def turn(engine, prompt, count, drafter=None):
    """Emit `count` tokens; ids, rows of log-probabilities, counters."""
    decoder = SpeculativeDecoder(engine, drafter, acceptance=ModelsChoice(with_logprobs=True))
    emissions = list(decoder.generate(prompt, max_tokens=count))
    rows = np.stack([exact(emission.logprobs) for emission in emissions])
    return [emission.token for emission in emissions], rows, decoder.stats


def check_turns(model, tokenizer, folder, *, before="", count=9):
    """Two turns plainly, drafted, and drafted with a file and another engine between them."""
    options = {"max_context_length": 1024, "tile_widths": (1, 2, 4, 8)}
    plain, drafted, other = (StaticShapeEngine(model, **options) for _ in range(3))
    prompt = tokenizer.encode(before + FIRST)
    tokens, rows, _ = turn(plain, prompt, count)
    ours, our_rows, stats = turn(drafted, prompt, count, PromptLookup(min_ngram=2))
    assert stats.accepted
    assert ours == tokens
    assert np.array_equal(our_rows, rows)
    save_prompt_cache(folder / "cache.safetensors", drafted)
    load_prompt_cache(folder / "cache.safetensors", other)
    second = [*prompt, *tokens, *tokenizer.encode(SECOND, add_special_tokens=False)]
    tokens, rows, _ = turn(plain, second, count)
    for engine in (drafted, other):
        ours, our_rows, stats = turn(engine, second, count, PromptLookup(min_ngram=2))
        assert stats.reused_tokens == len(prompt) + count - 1
        assert ours == tokens
        assert np.array_equal(our_rows, rows)


def test_turns_of_smollm2_are_plains(demo, tmp_path):
    check_turns(*demo("smollm2:bf16"), tmp_path)


@pytest.mark.deep
def test_turns_of_gemma3_past_its_window_are_plains(demo, tmp_path):
    check_turns(*demo("gemma3:bf16"), tmp_path, before="The keeper wrote it all down. " * 90)
