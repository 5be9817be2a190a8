"""A llama-family GGUF file as a model folder that mlx-lm loads: blocks, names, rotation order.

Blocks of 32 weights are MLX's affine quantisation under another layout, so nothing is quantised
a second time::

    Q4_1   w = d * q + m,  q in 0..15       4 bits, scale d, bias m
    Q8_0   w = d * q,      q in -128..127   8 bits of q + 128, scale d, bias -128 * d

With f32 scales the products above are exact, so the dequantised weights equal the file's bit for
bit; with bf16 scales each scale is rounded once and the integers stay as they are.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize

from .gguf_tokenizer import write_tokenizer
from .registry import Form

_GROUP = 32  # weights in a block, for both block types
_BITS = {GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}

# Name in the file -> name in mlx-lm's llama; "*" stands for the layer's number.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}


def convert(
    gguf: Path, folder: Path, form: Form, *, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Writes config, weights and tokenizer into an existing empty folder.

    Args:
        gguf: The model file.
        folder: Where to write ``config.json``, ``model.safetensors`` and the tokenizer's files.
        form: How to store the weights.
        on_bytes: Called after each tensor with the number of bytes of the file it took.

    Raises:
        ValueError: The file holds an architecture, a tensor or a vocabulary not known here.
        OSError: The folder's disk is full or failing.
    """
    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(metadata, tied=all(t.name != "output.weight" for t in reader.tensors))
    weights: dict[str, mx.array] = {}
    widths: dict[str, int] = {}
    for tensor in reader.tensors:
        name = _rename(tensor.name)
        data = _unpermute(tensor, config)
        if form.quantized and tensor.tensor_type in _BITS:
            widths[name] = _BITS[tensor.tensor_type]
            parts = _repack(data, tensor.tensor_type)
        else:
            parts = {"weight": dequantize(data, tensor.tensor_type).astype(np.float32)}
        for part, values in parts.items():
            array = mx.array(values)
            if array.dtype == mx.float32:
                array = array.astype(getattr(mx, form.dtype))
            weights[f"{name}.{part}"] = array
        on_bytes(int(tensor.n_bytes))
    config["torch_dtype"] = form.dtype
    if widths:
        config["quantization"] = _quantization(widths)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(metadata, folder, context_length=config["max_position_embeddings"])
    _save(folder / "model.safetensors", weights)


def _config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """mlx-lm's ``config.json`` for the file; ``tied``: the embedding is also the output layer."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(
            f"the file's architecture is {architecture!r}; only 'llama' can be converted"
        )
    if any(key.startswith("llama.rope.scaling.") for key in metadata):
        raise ValueError("the file scales its rotary positions, which is not converted")

    def read(key: str) -> Any:
        return metadata[f"llama.{key}"]

    heads = read("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": read("embedding_length"),
        "num_hidden_layers": read("block_count"),
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", read("embedding_length") // heads),
        # The file holds f32 values; the shortest decimal of each names the same f32 number.
        "rms_norm_eps": float(str(np.float32(read("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(str(np.float32(metadata.get("llama.rope.freq_base", 10_000.0)))),
        "max_position_embeddings": read("context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rename(stored: str) -> str:
    """The module mlx-lm keeps a tensor in."""
    name, _, kind = stored.rpartition(".")
    layer = ""
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        name = f"blk.*.{rest}"
    if kind != "weight" or name not in _NAMES:
        raise ValueError(f"the file holds the tensor {stored!r}, which llama has no place for")
    return _NAMES[name].replace("*", layer)


def _unpermute(tensor: ReaderTensor, config: Mapping[str, Any]) -> np.ndarray:
    """The tensor's rows in the order of rotary halves.

    Llama-family files store the rows of q and k so that the two rows of a rotated pair are
    neighbours; mlx-lm rotates row i of a head with row i + half. A row stays whole, so the order
    of packed rows can be undone without unpacking them.

    Returns:
        The stored values ``[rows, bytes]`` (packed) or ``[rows, columns]`` (floats).
    """
    if tensor.name.endswith("attn_q.weight"):
        heads = config["num_attention_heads"]
    elif tensor.name.endswith("attn_k.weight"):
        heads = config["num_key_value_heads"]
    else:
        return tensor.data
    rows = np.arange(tensor.data.shape[0])
    return tensor.data[rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)]


def _repack(data: np.ndarray, block: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Blocks as MLX's affine weights.

    Args:
        data: uint8 ``[rows, bytes]``, blocks of 20 bytes (Q4_1) or 34 bytes (Q8_0).
        block: Which of the two.

    Returns:
        ``weight`` uint32 ``[rows, columns * bits / 32]``, the first column in the lowest bits;
        ``scales`` and ``biases`` float32 ``[rows, columns / 32]``.
    """
    rows = data.shape[0]
    if block == GGMLQuantizationType.Q4_1:
        blocks = data.reshape(rows, -1, 20)
        scales, biases = _f16(blocks[..., 0:2]), _f16(blocks[..., 2:4])
        # Byte i of a block holds columns i (low half) and i + 16 (high half).
        nibbles = np.concatenate([blocks[..., 4:] & 0x0F, blocks[..., 4:] >> 4], axis=-1)
        packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    else:
        blocks = data.reshape(rows, -1, 34)
        scales = _f16(blocks[..., 0:2])
        biases = -128 * scales
        packed = blocks[..., 2:] ^ 0x80  # two's complement q as unsigned q + 128
    weight = np.ascontiguousarray(packed).view("<u4").reshape(rows, -1)
    return {"weight": weight, "scales": scales, "biases": biases}


def _f16(pairs: np.ndarray) -> np.ndarray:
    """uint8 ``[..., 2]`` read as little-endian f16, as float32 ``[...]``."""
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float32)


def _quantization(widths: Mapping[str, int]) -> dict[str, Any]:
    """The config's quantisation: 4 bits, and by name the modules that have 8."""
    common = {"group_size": _GROUP, "bits": 4, "mode": "affine"}
    return common | {name: common | {"bits": bits} for name, bits in widths.items() if bits != 4}


def _save(path: Path, weights: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        # MLX reports a short write without its errno.
        full = shutil.disk_usage(path.parent).free < sum(w.nbytes for w in weights.values())
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
