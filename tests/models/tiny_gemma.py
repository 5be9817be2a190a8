"""A tiny Gemma 3 as a GGUF file, with a vocabulary of sentencepiece's kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from sentencepiece import sentencepiece_model_pb2

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 6, 64, 4, 1, 32, 96
WINDOW = 4
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_LETTERS = "▁abcdehilnostrwx0123456789.,-<>/éあいש"
# In the order of their scores; each is the union of two that come before it or are letters.
_JOINED = (
    *("▁t", "he", "in", "er", "an", "the", "▁the", "▁a", "st", "--", "...", "..", "----", "aa"),
    *("ab", "aba", "aaa", "abab", "ha", "hah", "haha", "▁he", "▁hello", "hel", "lo", "hello", "ll"),
    *("▁w", "▁wo", "▁wor", "ld", "▁world", "ana", "anan", "nan", "éa", "あい", "ab▁", "▁x", "x▁"),
    *("<b", "b>"),
)
_USER_DEFINED = ["[multi]", *("\n" * n for n in range(1, 6)), *(" " * n for n in range(2, 8))]
_USER_DEFINED += ["\t", "\t\t", "<b>", "</b>"]
_PIECES = [
    *((token, -1000.0, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")),
    *((token, -1000.0, USER_DEFINED) for token in _USER_DEFINED),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *((token, -float(i), NORMAL) for i, token in enumerate(_JOINED)),
    *((letter, -1000.0 - i, NORMAL) for i, letter in enumerate(_LETTERS)),
]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [token for token, _, _ in _PIECES],
    "tokenizer.ggml.scores": [score for _, score, _ in _PIECES],
    "tokenizer.ggml.token_type": [kind for _, _, kind in _PIECES],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}


def sentencepiece_of(metadata: Mapping[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """Sentencepiece itself on a GGUF file's vocabulary."""
    proto = sentencepiece_model_pb2.ModelProto()
    unknown = metadata["tokenizer.ggml.unknown_token_id"]
    tokens = metadata["tokenizer.ggml.tokens"]
    for index, (token, score, kind) in enumerate(
        zip(
            tokens,
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
    ):
        spelled = token.replace(" ", "▁") if kind == USER_DEFINED else token
        kind = (
            sentencepiece_model_pb2.ModelProto.SentencePiece.UNKNOWN if index == unknown else kind
        )
        proto.pieces.add(piece=spelled, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    trainer.byte_fallback = True
    trainer.vocab_size = len(tokens)
    for role, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata[f"tokenizer.ggml.{key}_token_id"]
        setattr(trainer, f"{role}_id", token_id)
        setattr(trainer, f"{role}_piece", tokens[token_id])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def tiny_gemma_tensors() -> dict[str, np.ndarray]:
    """The values of the file, as it stores them: name without ".weight" -> float32."""
    return {name: dequantize(data, kind) for name, (data, kind) in _stored().items()}


def write_tiny_gemma(path: Path) -> None:
    """Write the file."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(WINDOW)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(VOCABULARY["tokenizer.ggml.tokens"])
    writer.add_token_scores(VOCABULARY["tokenizer.ggml.scores"])
    writer.add_token_types(VOCABULARY["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for name, (data, kind) in _stored().items():
        raw = None if kind == GGMLQuantizationType.F32 else kind
        writer.add_tensor(f"{name}.weight", data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored() -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Name -> values as stored, and how."""
    rng = np.random.default_rng(11)
    q5, q8, f32 = (GGMLQuantizationType[kind] for kind in ("Q5_0", "Q8_0", "F32"))
    shapes: list[tuple[str, GGMLQuantizationType, tuple[int, ...]]] = [
        ("token_embd", q8, (len(_PIECES), HIDDEN)),
        ("output_norm", f32, (HIDDEN,)),
    ]
    for i in range(LAYERS):
        for name, kind, shape in (
            ("attn_q", q5, (HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", q5, (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", q8, (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", q5, (HIDDEN, HEADS * HEAD_DIM)),
            ("ffn_gate", q5, (FEED_FORWARD, HIDDEN)),
            ("ffn_up", q5, (FEED_FORWARD, HIDDEN)),
            ("ffn_down", q5, (HIDDEN, FEED_FORWARD)),
            ("attn_q_norm", f32, (HEAD_DIM,)),
            ("attn_k_norm", f32, (HEAD_DIM,)),
            ("attn_norm", f32, (HIDDEN,)),
            ("post_attention_norm", f32, (HIDDEN,)),
            ("ffn_norm", f32, (HIDDEN,)),
            ("post_ffw_norm", f32, (HIDDEN,)),
        ):
            shapes.append((f"blk.{i}.{name}", kind, shape))
    stored = {}
    for name, kind, shape in shapes:
        values = rng.normal(size=shape).astype(np.float32)
        values = 1 + values / 4 if len(shape) == 1 else values / 4
        stored[name] = quantize(values, kind), kind
    return stored
