"""Which models the static engine takes, and for every other one the reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes

from mlxspec.errors import UnsupportedModel

# Modules of mlx_lm.models that the test suite builds from a tiny config and compares, token for
# token, with mlx-lm's own decoding. A family that is not here is refused, not guessed at: some
# models read their position off the keys' length and would be silently wrong.
STATIC_FAMILIES: frozenset[str] = frozenset()

# Reasons a person can act on, for families whose caches look plain and are not.
_REFUSED_FAMILIES = {
    "afm7": "it takes positions from the length of the keys, which is fixed here",
    "dbrx": "its experts are chosen on the host inside the forward, which cannot be compiled",
    "gpt_bigcode": "it reads the cache's position on the host, which cannot be compiled",
    "mamba": "its recurrent state cannot be rewound yet",
    "phi3small": "its block-sparse attention takes positions from the length of the keys",
    "llama4": "its chunked attention forgets keys that a rewind would need",
    "llama4_text": "its chunked attention forgets keys that a rewind would need",
}

# Position tables, not rotations: a padding row past the table would read foreign memory.
_LEARNED_POSITIONS = {"gpt2": "n_positions"}

_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
_FALLBACK_CONTEXT_LENGTH = 131_072


def family_of(model: nn.Module) -> str:
    """The module of `mlx_lm.models` that defines the model, for example "llama"."""
    return type(model).__module__.rpartition(".")[2]


def model_from_config(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config with random weights that are never computed: only its structure."""
    model_class, args_class = _get_classes(dict(config))
    return model_class(args_class.from_dict(dict(config)))


def why_not_static(model: nn.Module) -> str | None:
    """The reason the static engine cannot take this model, or None if it can.

    It looks at the structure alone, so a model whose weights are not loaded will do.
    """
    family = family_of(model)
    if not type(model).__module__.startswith("mlx_lm.models."):
        return f"{family} is a model of its own code, and only mlx-lm's are known to be exact here"
    if reason := _REFUSED_FAMILIES.get(family):
        return f"{family}: {reason}"
    for _, module in model.named_modules():
        if type(module).__name__ == "DynamicNTKScalingRoPE":
            return f"{family}: its rope type 'dynamic' changes every key with the length"
    kinds = [_foreign_kind(cache) for cache in make_prompt_cache(model)]
    foreign = sorted({kind for kind in kinds if kind is not None})
    if foreign:
        return f"{family} has {' and '.join(foreign)}, which the static engine cannot rewind yet"
    if family not in STATIC_FAMILIES:
        return f"{family} has not been checked to be exact in fixed-shape graphs"
    return None


def require_static(model: nn.Module) -> None:
    """Refuse by name what the static engine cannot take.

    Raises:
        UnsupportedModel: With the reason, and what to do instead.
    """
    if reason := why_not_static(model):
        raise UnsupportedModel(
            f"the static engine cannot run this model: {reason}. It runs plainly, without "
            "speculation, under the dynamic engine: --engine dynamic, or engine='dynamic'"
        )


def default_context_length(model: nn.Module, widest_tile: int) -> int:
    """The context length a model is used with when the user names none.

    Args:
        model: The model, with or without weights.
        widest_tile: Rows of the widest decode tile; a position table must have room for padding.
    """
    limit = context_limit(model, widest_tile)
    return limit if limit is not None else _declared_context(model) or _FALLBACK_CONTEXT_LENGTH


def context_limit(model: nn.Module, widest_tile: int) -> int | None:
    """The longest context the model can have at all, or None where positions are rotations."""
    field = _LEARNED_POSITIONS.get(family_of(model))
    return None if field is None else getattr(model.args, field) - widest_tile


def _declared_context(model: nn.Module) -> int | None:
    args = getattr(model, "args", None)
    for holder in (args, getattr(args, "text_config", None)):
        for field in _CONTEXT_FIELDS:
            value = holder.get(field) if isinstance(holder, dict) else getattr(holder, field, None)
            if isinstance(value, int) and value > 1:
                return value
    return None


def _foreign_kind(cache: object) -> str | None:
    """How a person would call a layer kind that is not full attention; None if it is."""
    if type(cache) is KVCache:
        return None
    return {
        "RotatingKVCache": "sliding-window layers",
        "ArraysCache": "recurrent layers",
        "MambaCache": "recurrent layers",
        "ChunkedKVCache": "chunked-attention layers",
        "CacheList": "layers with several states",
    }.get(type(cache).__name__, f"layers with a {type(cache).__name__}")
