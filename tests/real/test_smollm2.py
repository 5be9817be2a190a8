"""SmolLM2-135M-Instruct: token for token mlx-lm's own, plain and drafted, in every variant."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as mlx_lm_generate_step

import mlxspec
from mlxspec import PromptLookup, SpeculationStats

PROMPTS = (
    "Repeat this list twice, word for word: apple, banana, cherry, dragonfruit, elderberry.",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers, then write it again with a docstring.",
    "Tell me a short story about a lighthouse keeper and a storm.",
    'Return this JSON unchanged: {"name": "Ada", "born": 1815, "fields": ["mathematics", "logic"]}',
)


def prompt_ids(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def compare(demo, variant, text, count):
    """mlx-lm plain, ours plain, ours drafted: one text."""
    model, tokenizer = demo(f"smollm2:{variant}")
    prompt = prompt_ids(tokenizer, text)
    reference = [
        int(token) for token, _ in mlx_lm_generate_step(mx.array(prompt), model, max_tokens=count)
    ]
    options = {"max_tokens": count, "max_context_length": 1024, "tile_widths": (1, 2, 4, 8)}
    plain = [token for token, _, _ in mlxspec.generate_step(prompt, model, **options)]
    stats = SpeculationStats()
    drafter = PromptLookup(min_ngram=2)
    drafted = [
        token
        for token, _, _ in mlxspec.generate_step(
            prompt, model, drafter=drafter, stats=stats, **options
        )
    ]
    assert plain == reference
    assert drafted == reference
    assert stats.forwards == stats.rounds
    return stats


@pytest.mark.parametrize("variant", ["f32", "bf16", "4bit"])
def test_a_short_answer_is_mlx_lms_token_for_token(demo, variant):
    stats = compare(demo, variant, PROMPTS[0], 20)
    assert stats.accepted


@pytest.mark.deep
@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("variant", ["f32", "bf16", "4bit"])
def test_long_answers_are_mlx_lms_token_for_token(demo, variant, text):
    compare(demo, variant, text, 200)
