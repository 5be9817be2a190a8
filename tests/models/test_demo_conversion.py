"""The converted folder is the GGUF file's model: its weights, its rotation, its tokenizer."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from mlx_lm.utils import load as mlx_lm_load
from mlx_lm.utils import load_model

from mlxspec.models.convert import convert
from mlxspec.models.registry import choose_form
from tests.models.tiny_llama import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SPECIAL,
    TOKENS,
    tiny_tensors,
    write_tiny_gguf,
)

BITS = {GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}
IDS = [5, 17, 1, 200, 44, 44, 90, 3, 121, 8, 66]


def converted(gguf, folder, variant, *, on_metal=False):
    folder.mkdir()
    convert(gguf, folder, choose_form(variant, on_metal=on_metal))
    return folder


def bits_of(array) -> np.ndarray:
    return np.array(array).view(np.uint32)


def test_4bit_weights_are_the_files_own_bit_for_bit(gguf, tensors, tmp_path):
    weights = mx.load(str(converted(gguf, tmp_path / "m", "4bit") / "model.safetensors"))
    packed = [t for t in tensors if t.kind in BITS]
    for tensor in packed:
        parts = [weights[tensor.name.replace("weight", p)] for p in ("weight", "scales", "biases")]
        dense = mx.dequantize(*parts, group_size=32, bits=BITS[tensor.kind])
        assert dense.dtype == mx.float32
        assert np.array_equal(bits_of(dense), bits_of(tensor.values)), tensor.name
    assert len(packed) == 1 + 7 * LAYERS
    assert len(weights) == len(tensors) + 2 * len(packed)


def test_on_metal_the_integers_stay_and_only_the_scales_are_rounded(gguf, tmp_path):
    exact = mx.load(str(converted(gguf, tmp_path / "cpu", "4bit") / "model.safetensors"))
    rounded_path = converted(gguf, tmp_path / "gpu", "4bit", on_metal=True)
    rounded = mx.load(str(rounded_path / "model.safetensors"))
    assert rounded.keys() == exact.keys()
    for name, array in exact.items():
        if array.dtype == mx.uint32:
            assert mx.array_equal(rounded[name], array)
        else:
            assert rounded[name].dtype == mx.bfloat16
            assert mx.array_equal(rounded[name], array.astype(mx.bfloat16))


@pytest.mark.parametrize(("variant", "dtype"), [("f32", mx.float32), ("bf16", mx.bfloat16)])
def test_dense_forms_are_the_dequantised_file(gguf, tensors, tmp_path, variant, dtype):
    weights = mx.load(str(converted(gguf, tmp_path / "m", variant) / "model.safetensors"))
    assert weights.keys() == {tensor.name for tensor in tensors}
    for tensor in tensors:
        assert weights[tensor.name].dtype == dtype
        assert mx.array_equal(weights[tensor.name], mx.array(tensor.values).astype(dtype))


def test_f32_logits_equal_mlx_lms_llama_with_the_same_weights(gguf, tensors, tmp_path):
    model, config = load_model(converted(gguf, tmp_path / "m", "f32"))
    reference = llama.Model(llama.ModelArgs.from_dict(config))
    reference.load_weights([(t.name, mx.array(t.values)) for t in tensors])
    assert mx.array_equal(model(mx.array([IDS])), reference(mx.array([IDS])))


def interleaved_logits(tensors) -> np.ndarray:
    """The model as the file means it: q and k rows as stored, neighbours rotated together."""
    w = {t.stored_name.removesuffix(".weight"): dequantize(t.stored, t.kind) for t in tensors}
    w = {name: values.astype(np.float64) for name, values in w.items()}
    count = len(IDS)
    angles = np.arange(count)[:, None] * 1000.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    turn = np.exp(1j * angles)[:, None]

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x, heads):
        pairs = x.reshape(count, heads, -1, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(count, heads, HEAD_DIM)

    x = w["token_embd"][IDS]
    for i in range(LAYERS):
        h = norm(x, w[f"blk.{i}.attn_norm"])
        q = rotate(h @ w[f"blk.{i}.attn_q"].T, HEADS)
        k = rotate(h @ w[f"blk.{i}.attn_k"].T, KV_HEADS).repeat(HEADS // KV_HEADS, 1)
        v = (h @ w[f"blk.{i}.attn_v"].T).reshape(count, KV_HEADS, HEAD_DIM)
        v = v.repeat(HEADS // KV_HEADS, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(count, HEADS * HEAD_DIM)
        x = x + mixed @ w[f"blk.{i}.attn_output"].T
        h = norm(x, w[f"blk.{i}.ffn_norm"])
        gate = h @ w[f"blk.{i}.ffn_gate"].T
        inner = gate / (1 + np.exp(-gate)) * (h @ w[f"blk.{i}.ffn_up"].T)
        x = x + inner @ w[f"blk.{i}.ffn_down"].T
    return norm(x, w["output_norm"]) @ w["token_embd"].T


@pytest.mark.parametrize("variant", ["f32", "4bit"])
def test_rotation_means_what_the_file_means(gguf, tensors, tmp_path, variant):
    """Against a float64 reference that rotates neighbours, as the file stores them.

    The logits reach 7; a GPU's fast f32 products may be off by some hundredths, a permutation that
    was not undone is off by 9.
    """
    model, _ = load_model(converted(gguf, tmp_path / "m", variant))
    expected = interleaved_logits(tensors)
    assert np.allclose(np.array(model(mx.array([IDS])))[0], expected, rtol=0, atol=0.05)

    rows = np.arange(HEADS * HEAD_DIM).reshape(HEADS, 2, -1).swapaxes(1, 2).reshape(-1)
    projection = model.layers[0].self_attn.q_proj
    for name, values in projection.parameters().items():
        projection[name] = values[mx.array(rows)]
    left_permuted = np.array(model(mx.array([IDS])))[0]
    assert not np.allclose(left_permuted, expected, rtol=0, atol=1)


def test_an_output_layer_of_its_own_is_kept(tmp_path):
    tensors = tiny_tensors(tied=False)
    write_tiny_gguf(tmp_path / "untied.gguf", tensors)
    model, config = load_model(converted(tmp_path / "untied.gguf", tmp_path / "m", "4bit"))
    assert config["tie_word_embeddings"] is False
    assert model.lm_head.bits == 8
    head = model.lm_head
    dense = mx.dequantize(head.weight, head.scales, head.biases, group_size=32, bits=8)
    assert np.array_equal(bits_of(dense), bits_of(tensors[-1].values))


def test_config_says_the_files_numbers(gguf, tmp_path):
    config = json.loads((converted(gguf, tmp_path / "m", "bf16") / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1000.0
    assert (config["hidden_size"], config["head_dim"]) == (HIDDEN, HEAD_DIM)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 128)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "architecture is 'mamba'"),
        ({"vocabulary": "bert"}, "vocabulary is of kind 'bert'"),
        ({"cut": "tekken"}, "cut as 'tekken'"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tensors, tmp_path, change, message):
    write_tiny_gguf(tmp_path / "other.gguf", tensors, **change)
    with pytest.raises(ValueError, match=message):
        converted(tmp_path / "other.gguf", tmp_path / "m", "f32")


def test_a_tensor_without_a_place_is_refused_by_name(tensors, tmp_path):
    odd = dataclasses.replace(tensors[-1], stored_name="rope_freqs.weight")
    write_tiny_gguf(tmp_path / "odd.gguf", [*tensors, odd])
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        converted(tmp_path / "odd.gguf", tmp_path / "m", "f32")


@pytest.fixture(scope="module")
def tokenizer(gguf, tmp_path_factory):
    folder = converted(gguf, tmp_path_factory.mktemp("tokenizer") / "m", "f32")
    return mlx_lm_load(str(folder))[1]


@pytest.mark.parametrize(
    "text",
    ["abab 121212", "  two  spaces\n\n\ttab ", "é 日本 🦊", "don't", "x<|im_end|>y", "½Ⅷ٣12"],
)
def test_text_survives_the_tokenizer_and_the_streaming_detokenizer(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text.removeprefix(" ")  # mlx-lm drops one space at the very start


def test_digits_stand_alone_though_a_merge_would_join_them(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab1212")) == ["ab", *"1212"]


def test_control_tokens_stay_whole(tokenizer):
    assert tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]


def test_mlx_lm_streams_it_as_byte_level_bpe(tokenizer):
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)


def test_special_roles_and_chat_template_come_from_the_file(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab 1"}], add_generation_prompt=True
    )
    text = "<|im_start|>user\nab 1<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text)
