"""mlx-lm's prompt cache files: gone on from as mlx-lm goes on, or refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from mlxspec import PromptCacheError, StaticShapeEngine, load_prompt_cache
from tests.cases import PLANS, mlx_lm_tokens, prompt_of, varied_model
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter
from tests.rings.test_window_models import snapshot
from tests.turns.test_turns import WIDE, WINDOW, turn

SUFFIX = [3, 4, 5]


@dataclass(frozen=True)
class Case:
    """A model, and how mlx-lm keeps its keys."""

    family: str
    changes: dict = field(default_factory=dict, hash=False)
    kv: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        return f"{self.family} {'kv' if self.kv else ''}".strip()


KV = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
CASES = [
    Case("llama"),
    Case("llama", WIDE, KV),
    Case("gemma3_text", {"sliding_window": WINDOW}),
    Case("gemma4_text"),
    Case("lfm2"),
    Case("qwen3_next"),
    Case("qwen3_next", WIDE, KV),
]


@pytest.fixture(autouse=True)
def uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


def model_of(case):
    return varied_model(case.family, **case.changes)


def engine_of(case, **options):
    options = {"tile_widths": (1, 2, 4, 8), "max_context_length": 120} | case.kv | options
    return StaticShapeEngine(model_of(case), prefill_step_size=16, span_step=32, **options)


def mlx_lm_file(file, model, prompt, decoded=0, caches=None, **kv):
    """Write what `mlx_lm.cache_prompt` writes of a prompt, and maybe some tokens decoded on."""
    caches = caches or mlx_lm_cache.make_prompt_cache(model)
    options = {"prompt_cache": caches, "prefill_step_size": 16, **kv}
    for _ in generate_step(mx.array(prompt), model, max_tokens=0, **options):
        pass
    for token in prompt_of(decoded, seed=4):
        model(mx.array([[token]]), cache=caches)
    mlx_lm_cache.save_prompt_cache(str(file), caches, {"model": "tiny", "tokenizer_config": "{}"})
    return prompt + prompt_of(decoded, seed=4)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("length", "decoded"), [(30, 0), (12, 0), (30, 6), (25, 40)])
def test_what_follows_is_what_mlx_lm_says_from_the_same_file(case, length, decoded, tmp_path):
    file = tmp_path / "cache.safetensors"
    tokens = mlx_lm_file(file, model_of(case), prompt_of(length), decoded, **case.kv)
    caches = mlx_lm_cache.load_prompt_cache(str(file))
    expected = mlx_lm_tokens(model_of(case), SUFFIX, 12, prompt_cache=caches, **case.kv)
    engine = engine_of(case)
    assert load_prompt_cache(file, engine, prompt=tokens)["model"] == "tiny"
    text = [*tokens, *SUFFIX]
    drafter = PlannedDrafter([*text, *expected], PLANS["noisy"], engine.vocab_size)
    ours, _, stats = turn(engine, text, 12, drafter)
    assert ours == expected
    assert stats.reused_tokens == len(tokens)
    assert stats.accepted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_prompt_than_the_files_is_refused(case, tmp_path):
    """One other token anywhere that the file can tell of; nothing of the engine is lost."""
    file = tmp_path / "cache.safetensors"
    prompt = mlx_lm_file(file, model_of(case), prompt_of(20), **case.kv)
    engine = engine_of(case)
    engine.prefill([1, 2, 3])
    before = snapshot(engine)
    for at in (6, 13, 19):
        other = [*prompt[:at], prompt[at] + 50, *prompt[at + 1 :]]
        with pytest.raises(PromptCacheError, match="made with other tokens than the prompt given"):
            load_prompt_cache(file, engine, prompt=other)
    with pytest.raises(PromptCacheError, match="covers 20 tokens, and the prompt given has 19"):
        load_prompt_cache(file, engine, prompt=prompt[:-1])
    with pytest.raises(PromptCacheError, match="does not say which tokens it covers: give them"):
        load_prompt_cache(file, engine)
    assert snapshot(engine) == before


def test_a_file_with_forgotten_tokens_is_refused(tmp_path):
    file, model = tmp_path / "cache.safetensors", varied_model("llama")
    caches = [mlx_lm_cache.RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
    prompt = mlx_lm_file(file, model, prompt_of(30), caches=caches)
    with pytest.raises(PromptCacheError, match=r"made with --max-kv-size: it keeps the first 4"):
        load_prompt_cache(file, engine_of(Case("llama")), prompt=prompt)


def test_another_model_or_quantisation_is_refused(tmp_path):
    file = tmp_path / "cache.safetensors"
    prompt = mlx_lm_file(file, varied_model("llama"), prompt_of(20))
    for case, reason in (
        (Case("gemma3_text"), "made with a model of other layers"),
        (Case("llama", {"num_hidden_layers": 5}), "made with a model of other layers"),
        (Case("llama", {"head_dim": 32}), "made with a model of other sizes"),
    ):
        with pytest.raises(PromptCacheError, match=reason):
            load_prompt_cache(file, engine_of(case), prompt=prompt)
    other = StaticShapeEngine(tiny_model("llama", seed=3), max_context_length=60)
    with pytest.raises(PromptCacheError, match="other tokens than the prompt given, or with anoth"):
        load_prompt_cache(file, other, prompt=prompt)
    case = Case("llama", WIDE, KV)
    prompt = mlx_lm_file(file, model_of(case), prompt_of(20), **KV)
    for kv in ({}, KV | {"kv_bits": 4}, KV | {"kv_group_size": 64}):
        with pytest.raises((PromptCacheError, ValueError), match=r"quantised|kv_bits"):
            load_prompt_cache(file, engine_of(Case("llama", WIDE, kv)), prompt=prompt)
    later = engine_of(Case("llama", WIDE, KV | {"quantized_kv_start": 24}))
    with pytest.raises(PromptCacheError, match=r"quantised after 20 tokens, and this.* 24 on"):
        load_prompt_cache(file, later, prompt=prompt)
    assert not later.tokens


def test_a_cache_of_another_kind_and_a_damaged_file_are_refused(tmp_path):
    file, engine = tmp_path / "cache.safetensors", engine_of(Case("llama"))
    prompt, model = prompt_of(20), varied_model("llama")
    caches = [mlx_lm_cache.ConcatenateKVCache() for _ in model.layers]
    mlx_lm_file(file, model, prompt, caches=caches)
    with pytest.raises(PromptCacheError, match="a ConcatenateKVCache, which cannot be gone on"):
        load_prompt_cache(file, engine, prompt=prompt)
    mlx_lm_file(file, model, prompt)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(PromptCacheError, match="only a part of one"):
        load_prompt_cache(file, engine, prompt=prompt)
