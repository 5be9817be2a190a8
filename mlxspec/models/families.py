"""What a GGUF file's keys and tensors mean to mlx-lm, one entry for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import ReaderTensor

# Not in the files, and the same in every model of the family.
_GEMMA3_LOCAL_ROPE = 10_000.0
_GEMMA3_PATTERN = 6  # every sixth layer sees everything

# Name in the file -> name in mlx-lm; "*" stands for the layer's number.
_COMMON_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: Its name in GGUF files, which is also the prefix of its keys.
        names: Name of a tensor in the file -> name of the module in mlx-lm.
        own_config: The entries of ``config.json`` that not every family has; given the config so
            far and a function that reads a key of the file, with a default for missing ones.
        paired_rows: Whether the file keeps the two rows of a rotated pair of q and k as
            neighbours; mlx-lm rotates row i of a head with row i + half.
        norm_offset: What the file adds to the weights of norms.
    """

    architecture: str
    names: Mapping[str, str]
    own_config: Callable[[dict[str, Any], Callable[..., Any]], dict[str, Any]]
    paired_rows: bool = False
    norm_offset: float = 0.0

    def config(self, metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
        """mlx-lm's ``config.json``.

        Args:
            metadata: The file's key-value pairs.
            tied: Whether the embedding is also the output layer.

        Raises:
            ValueError: The file scales its rotary positions.
        """
        if any(key.startswith(f"{self.architecture}.rope.scaling.") for key in metadata):
            raise ValueError("the file scales its rotary positions, which is not converted")

        def read(key: str, *default: Any) -> Any:
            name = f"{self.architecture}.{key}"
            return metadata.get(name, *default) if default else metadata[name]

        heads = read("attention.head_count")
        common = {
            "hidden_size": read("embedding_length"),
            "num_hidden_layers": read("block_count"),
            "intermediate_size": read("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": read("attention.head_count_kv", heads),
            "rms_norm_eps": _shortest(read("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(read("rope.freq_base", 10_000.0)),
            "max_position_embeddings": read("context_length"),
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": tied,
            "attention_bias": False,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }
        return common | self.own_config(common, read)

    def rename(self, stored: str) -> str:
        """The module mlx-lm keeps a tensor in.

        Raises:
            ValueError: The family has no place for the tensor.
        """
        name, _, kind = stored.rpartition(".")
        layer = ""
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            name = f"blk.*.{rest}"
        if kind != "weight" or name not in self.names:
            raise ValueError(
                f"the file holds the tensor {stored!r}, which {self.architecture} has no place for"
            )
        return self.names[name].replace("*", layer)

    def rows(self, tensor: ReaderTensor, config: Mapping[str, Any]) -> np.ndarray:
        """The tensor's rows in mlx-lm's order.

        A row stays whole, so the order of packed rows can be undone without unpacking them.

        Returns:
            The stored values ``[rows, bytes]`` (packed) or ``[rows, columns]`` (floats).
        """
        if self.paired_rows and tensor.name.endswith("attn_q.weight"):
            heads = config["num_attention_heads"]
        elif self.paired_rows and tensor.name.endswith("attn_k.weight"):
            heads = config["num_key_value_heads"]
        else:
            return tensor.data
        rows = np.arange(tensor.data.shape[0])
        return tensor.data[rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)]


def family_of(metadata: Mapping[str, Any]) -> Family:
    """The entry for a file.

    Raises:
        ValueError: There is none for its architecture.
    """
    architecture = metadata["general.architecture"]
    if architecture not in FAMILIES:
        raise ValueError(
            f"the file's architecture is {architecture!r}; only {' and '.join(FAMILIES)} can be "
            "converted"
        )
    return FAMILIES[architecture]


def _llama_config(config: dict[str, Any], read: Callable[..., Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": read("rope.dimension_count", head_dim),
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def _gemma3_config(config: dict[str, Any], read: Callable[..., Any]) -> dict[str, Any]:
    head_dim = read("attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        # The file does not say by what scores are scaled; below 27B it is the head's size.
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": _GEMMA3_LOCAL_ROPE,
        "sliding_window": read("attention.sliding_window"),
        "sliding_window_pattern": read("attention.sliding_window_pattern", _GEMMA3_PATTERN),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _shortest(value: float) -> float:
    """The file holds f32 values; the shortest decimal of each names the same f32 number."""
    return float(str(np.float32(value)))


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "llama",
            _COMMON_NAMES
            | {"output": "lm_head", "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm"},
            _llama_config,
            paired_rows=True,
        ),
        Family(
            "gemma3",
            _COMMON_NAMES
            | {
                "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
                "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
                "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
                "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
                "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
            },
            _gemma3_config,
            norm_offset=1.0,
        ),
    )
}
