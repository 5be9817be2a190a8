"""A Gemma 3 file becomes mlx-lm's gemma3_text, and its tokens are sentencepiece's own."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from mlx_lm.utils import load as mlx_lm_load
from mlx_lm.utils import load_model

from mlxspec.models.convert import convert
from mlxspec.models.gguf_tokenizer import build_tokenizer
from mlxspec.models.registry import choose_form
from tests.models.tiny_gemma import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WINDOW,
    sentencepiece_of,
    tiny_gemma_tensors,
    write_tiny_gemma,
)

IDS = [2, 300, 281, 17, 290, 5, 331, 299, 288, 304, 41, 310]
REFERENCE = sentencepiece_of(VOCABULARY)
TOKENIZER = build_tokenizer(VOCABULARY)
TEXTS = [
    "",
    "hello world",
    "  hello   the world ",
    "\n\n\n\n\n\n\n\t\t\tx",
    " " * 40,
    "<b>the</b>hello<b",
    "[multi][mult",
    "0123 456.789",
    "日本語 あいあ 😀👍🏽 é e\u0301",
    "שלום",
    "\x00\x7f\ufffd\U0010ffff",
    "▁a▁▁b",
    "ababababababa aaaaaaaaa hahahahaha bananana ------......",
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    write_tiny_gemma(path)
    return path


@pytest.fixture(scope="module")
def f32(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(gemma, tmp_path_factory.mktemp("gemma") / "f32", "f32")


def converted(gguf: Path, folder: Path, variant: str) -> Path:
    folder.mkdir()
    convert(gguf, folder, choose_form(variant, on_metal=False))
    return folder


# The model.


def test_config_says_the_files_numbers_and_what_the_family_has_in_common(f32: Path) -> None:
    config = json.loads((f32 / "config.json").read_text())
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected


def file_logits() -> np.ndarray:
    """The model as the file means it: norm weights as stored, in float64."""
    w = {name: values.astype(np.float64) for name, values in tiny_gemma_tensors().items()}
    count = len(IDS)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def rotate(x: np.ndarray, base: float) -> np.ndarray:
        half = HEAD_DIM // 2
        angles = np.arange(count)[:, None, None] * base ** (-np.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, low * sin + high * cos], -1)

    distance = np.arange(count)[:, None] - np.arange(count)
    x = w["token_embd"][IDS] * HIDDEN**0.5
    for i in range(LAYERS):
        layer = {name.split(".")[2]: v for name, v in w.items() if name.startswith(f"blk.{i}.")}
        is_global = i % 6 == 5
        base = 1_000_000.0 if is_global else 10_000.0
        visible = (distance >= 0) & (is_global | (distance < WINDOW))
        h = norm(x, layer["attn_norm"])
        q = (h @ layer["attn_q"].T).reshape(count, HEADS, HEAD_DIM)
        k = (h @ layer["attn_k"].T).reshape(count, KV_HEADS, HEAD_DIM)
        q = rotate(norm(q, layer["attn_q_norm"]), base)
        k = rotate(norm(k, layer["attn_k_norm"]), base).repeat(HEADS // KV_HEADS, 1)
        v = (h @ layer["attn_v"].T).reshape(count, KV_HEADS, HEAD_DIM)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores = np.where(visible, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v.repeat(HEADS // KV_HEADS, 1))
        out = mixed.reshape(count, HEADS * HEAD_DIM) @ layer["attn_output"].T
        x = x + norm(out, layer["post_attention_norm"])
        h = norm(x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        out = (gate * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
        x = x + norm(out, layer["post_ffw_norm"])
    return norm(x, w["output_norm"]) @ w["token_embd"].T


def test_logits_are_what_the_file_means(f32: Path) -> None:
    """Against a float64 reference; the norms' 1 left in is off by whole numbers."""
    model, _ = load_model(f32)
    logits = np.array(model(mx.array([IDS])))[0]
    expected = file_logits()
    assert np.allclose(logits, expected, rtol=0, atol=0.05)

    model.model.norm.weight = model.model.norm.weight + 1
    offset_left = np.array(model(mx.array([IDS])))[0]
    assert not np.allclose(offset_left, expected, rtol=0, atol=1)


def test_bf16_is_f32_rounded_once(gemma: Path, f32: Path, tmp_path: Path) -> None:
    exact = mx.load(str(f32 / "model.safetensors"))
    rounded = mx.load(str(converted(gemma, tmp_path / "m", "bf16") / "model.safetensors"))
    assert rounded.keys() == exact.keys()
    for name, array in exact.items():
        assert mx.array_equal(rounded[name], array.astype(mx.bfloat16)), name


def test_4bit_keeps_blocks_of_8_bits_and_quantises_the_others(
    gemma: Path, f32: Path, tmp_path: Path
) -> None:
    dense = mx.load(str(f32 / "model.safetensors"))
    model, config = load_model(converted(gemma, tmp_path / "m", "4bit"))
    assert (config["quantization"]["bits"], config["quantization"]["group_size"]) == (4, 32)
    attention = model.layers[3].self_attn
    for module, name, bits in (
        (model.model.embed_tokens, "model.embed_tokens", 8),
        (attention.v_proj, "model.layers.3.self_attn.v_proj", 8),
        (attention.q_proj, "model.layers.3.self_attn.q_proj", 4),
        (model.layers[5].mlp.down_proj, "model.layers.5.mlp.down_proj", 4),
    ):
        assert module.bits == bits
        stored = mx.dequantize(
            module.weight, module.scales, module.biases, group_size=32, bits=bits
        )
        original = dense[f"{name}.weight"]
        if bits == 8:
            assert mx.array_equal(stored, original)
        else:
            groups = original.reshape(original.shape[0], -1, 32)
            step = (groups.max(-1) - groups.min(-1)) / 15
            error = mx.abs(stored - original).reshape(groups.shape).max(-1)
            assert mx.all(error <= step).item()
    norm = "model.layers.0.input_layernorm.weight"
    assert mx.array_equal(model.layers[0].input_layernorm.weight, dense[norm])


# The tokenizer.


def assert_same_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ids == REFERENCE.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_sentencepieces(text: str) -> None:
    assert_same_tokens(text)


# Surrogates cannot be written in UTF-8.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
FAMILIAR = st.text(st.sampled_from("▁ abhelowrdtn.-<>/\n\t01é"), max_size=60)
PIECES = st.lists(st.sampled_from(VOCABULARY["tokenizer.ggml.tokens"][5:]), max_size=12)


@given(st.one_of(ANY_TEXT, FAMILIAR, PIECES.map("".join)))
def test_ids_are_sentencepieces_whatever_the_text(text: str) -> None:
    assert_same_tokens(text)


def test_control_tokens_are_one_token_each_and_bos_comes_first_once(f32: Path) -> None:
    _, tokenizer = mlx_lm_load(str(f32))
    assert tokenizer.encode("<eos><mask>") == [2, 1, 4]
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("<eos>", add_special_tokens=False) == [1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, {1})


@pytest.mark.parametrize("text", [text for text in TEXTS if "▁" not in text])
def test_mlx_lm_streams_every_text_whole(f32: Path, text: str) -> None:
    _, tokenizer = mlx_lm_load(str(f32))
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, SPMStreamingDetokenizer)
    assert not detokenizer.trim_space
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == tokenizer.decode(ids) == text


def test_a_vocabulary_with_a_space_before_every_text_is_refused() -> None:
    with pytest.raises(ValueError, match="space before every text"):
        build_tokenizer(VOCABULARY | {"tokenizer.ggml.add_space_prefix": True})
