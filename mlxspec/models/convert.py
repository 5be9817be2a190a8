"""A GGUF file as a model folder that mlx-lm loads: which weights stay packed, and how.

Two kinds of block are MLX's affine quantisation of groups of 32 under another layout, so they are
not quantised a second time::

    Q4_1   w = d * q + m,  q in 0..15       4 bits, scale d, bias m
    Q8_0   w = d * q,      q in -128..127   8 bits of q + 128, scale d, bias -128 * d

With f32 scales the products above are exact, so the dequantised weights equal the file's bit for
bit; with bf16 scales each scale is rounded once and the integers stay as they are. Blocks of other
kinds are dequantised, and in the 4-bit form quantised by MLX, in groups of 32 too: of the sizes MLX
has it is the nearest to the blocks they come from.
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
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from mlxspec.models.families import Family, family_of
from mlxspec.models.gguf_tokenizer import write_tokenizer
from mlxspec.models.registry import Form

_GROUP = 32  # weights with a scale of their own
_BITS = {GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}


def convert(
    gguf: Path, folder: Path, form: Form, *, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Write config, weights and tokenizer into an existing empty folder.

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
    family = family_of(metadata)
    config = family.config(metadata, tied=all(t.name != "output.weight" for t in reader.tensors))
    weights: dict[str, mx.array] = {}
    widths: dict[str, int] = {}
    for tensor in reader.tensors:
        name = family.rename(tensor.name)
        data = family.rows(tensor, config)
        parts, bits = _parts(data, tensor.tensor_type, family, quantized=form.quantized)
        if bits is not None:
            widths[name] = bits
        for part, array in parts.items():
            if array.dtype == mx.float32:
                array = array.astype(getattr(mx, form.dtype))
            weights[f"{name}.{part}"] = array
        # Now, not at the end: the f32 values of a large embedding must not outlive their turn.
        mx.eval([weights[f"{name}.{part}"] for part in parts])
        on_bytes(int(tensor.n_bytes))
    config["torch_dtype"] = form.dtype
    if widths:
        config["quantization"] = _quantization(widths)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(metadata, folder, context_length=config["max_position_embeddings"])
    _save(folder / "model.safetensors", weights)


def _parts(
    data: np.ndarray, block: GGMLQuantizationType, family: Family, *, quantized: bool
) -> tuple[dict[str, mx.array], int | None]:
    """A tensor's values as mlx-lm keeps them.

    Returns:
        ``weight``, and if it is packed ``scales`` and ``biases``; floats are f32. The number of
        bits it is packed in, or None.
    """
    if quantized and block in _BITS:
        parts = {part: mx.array(values) for part, values in _repack(data, block).items()}
        return parts, _BITS[block]
    values = mx.array(dequantize(data, block).astype(np.float32))
    if values.ndim == 1:  # of all these tensors, only norms have one axis
        return {"weight": values - family.norm_offset}, None
    if not quantized:
        return {"weight": values}, None
    packed = mx.quantize(values, group_size=_GROUP, bits=4)
    return dict(zip(("weight", "scales", "biases"), packed, strict=True)), 4


def _repack(data: np.ndarray, block: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Repack blocks as MLX's affine weights.

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
