"""Which models the static engine takes, and for every other one the reason why not."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlxspec.engine.placement import Placement
from mlxspec.engine.state import KVQuantization, foreign_kinds, layer_kind
from mlxspec.errors import UnsupportedModel
from mlxspec.numbers import whole_number

# Modules of mlx_lm.models that the test suite builds from a tiny config and compares, token for
# token and row for row, with mlx-lm's own decoding. A family that is not here is refused, not
# guessed at: some models read their position off the keys' length and would be silently wrong.
# fmt: off
STATIC_FAMILIES: frozenset[str] = frozenset({
    "afmoe", "apertus", "baichuan_m1", "bailing_moe", "bailing_moe_linear", "cohere", "cohere2",
    "deepseek", "deepseek_v2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "falcon_h1", "gear", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n",
    "gemma4", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "gptj",
    "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense",
    "internlm2", "internlm3", "iquestloopcoder", "jamba", "Klear", "laguna", "lfm2", "lfm2-vl",
    "lfm2_moe", "lille-130m", "llama", "llama4_text", "mamba2", "mellum", "mimo", "mimo_v2_flash",
    "minicpm", "minicpm3", "minimax", "ministral3", "mistral3", "mixtral", "muse_glimmer",
    "nanbeige", "nanochat", "nemotron", "nemotron-nas", "nemotron_h", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "openelm", "phi", "phi3", "phimoe", "phixtral", "pixtral", "plamo",
    "plamo2", "prism_hadamard_qwen35", "qwen", "qwen2", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma",
    "rwkv7", "seed_oss", "smollm3", "spark2_5", "stablelm", "starcoder2", "step3p5", "talkie",
    "telechat3", "youtu_llm",
})

# Recurrent families whose rows are bitwise equal in every width (measured by the test suite on
# MLX's CPU backend). The others are placed at multiples of one width, where that does not matter.
_ANCHORED_FAMILIES = frozenset({
    "baichuan_m1", "bailing_moe_linear", "gear", "jamba", "lfm2", "lfm2-vl", "lfm2_moe",
    "olmo_hybrid", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "recurrent_gemma", "rwkv7",
})
# fmt: on

# Families that treat the first token apart, which they tell by a missing recurrent state.
_WITHOUT_FIRST_STATE = frozenset({"recurrent_gemma"})

_COMPRESSED_KEYS = (
    "it computes attention in one way for one row and in another, which expands all compressed "
    "keys, for several, so that their results differ"
)

# Reasons a person can act on, for families whose caches look plain and are not.
_REFUSED_FAMILIES = {
    "afm7": "it takes positions from the length of the keys, which is fixed here",
    "bailing_hybrid": _COMPRESSED_KEYS,
    "bailing_moe_v3": _COMPRESSED_KEYS,
    "bitnet": "its matrices are multiplied by a kernel that exists for Metal alone",
    "dbrx": "its experts are chosen on the host inside the forward, which cannot be compiled",
    "deepseek_v3": _COMPRESSED_KEYS,
    "deepseek_v32": _COMPRESSED_KEYS,
    "glm4_moe_lite": _COMPRESSED_KEYS,
    "glm_moe_dsa": _COMPRESSED_KEYS,
    "gpt_bigcode": "it reads the cache's position on the host, which cannot be compiled",
    "kimi_k25": _COMPRESSED_KEYS,
    "kimi_k3": _COMPRESSED_KEYS,
    "kimi_linear": _COMPRESSED_KEYS,
    "kimi_vl": _COMPRESSED_KEYS,
    "llama4": "its chunked attention forgets keys that a rewind would need",
    "longcat_flash": _COMPRESSED_KEYS,
    "longcat_flash_ngram": _COMPRESSED_KEYS,
    "mamba": "it looks for mlx-lm's own class of recurrent state and finds another",
    "minimax_m3_vl": "its sparse attention takes positions from the length of the keys",
    "mistral4": _COMPRESSED_KEYS,
    "muse_spark": "it is made of kernels that exist for Metal alone",
    "olmo": "mlx-lm itself cannot generate with it: it adds its mask as a number",
    "phi3small": "its block-sparse attention takes positions from the length of the keys",
    "plamo3": "its sliding window is one key longer over a prompt than while decoding",
}

# Position tables, not rotations: a padding row past the table would read foreign memory.
_LEARNED_POSITIONS = {"gpt2": "n_positions"}

# How configs call the longest sequence, the clearest name first.
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_context_length",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    "seq_len",
    "sequence_len",
    "block_size",
)
# Where a config with several parts describes the one that writes text.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
# What the config said hangs on the model: not every family of mlx-lm keeps it.
_CONTEXT_ATTRIBUTE = "_mlxspec_context_length"
_FALLBACK_CONTEXT_LENGTH = 131_072


def family_of(model: nn.Module) -> str:
    """The module of `mlx_lm.models` that defines the model, for example "llama"."""
    return type(model).__module__.rpartition(".")[2]


def model_from_config(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config with random weights that are never computed: only its structure."""
    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    remember_context_length(model, config)
    return model


def remember_context_length(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Keep with the model how long a sequence its config allows, for `default_context_length`.

    Many of mlx-lm's models do not read that field, which says how long the texts were that they
    have been trained on.
    """
    length = _declared_in(*(config.get(part) for part in _TEXT_PARTS), config)
    if length is not None:
        model.__dict__[_CONTEXT_ATTRIBUTE] = length


def why_not_static(model: nn.Module) -> str | None:
    """The reason the static engine cannot take this model, or None if it can.

    It looks at the structure alone, so a model whose weights are not loaded will do.
    """
    family = family_of(model)
    if not type(model).__module__.startswith("mlx_lm.models."):
        return f"{family} is a model of its own code, and only mlx-lm's are known to be exact here"
    parts = _families_inside(model)
    for part in parts:
        if reason := _REFUSED_FAMILIES.get(part):
            return f"{family}: {reason}" if part == family else f"{family} holds {part}: {reason}"
    for _, module in model.named_modules():
        if type(module).__name__ == "DynamicNTKScalingRoPE":
            return f"{family}: its rope type 'dynamic' changes every key with the length"
    if foreign := foreign_kinds(make_prompt_cache(model)):
        return f"{family} has layers with {' and '.join(foreign)}, whose state cannot be rewound"
    for part in parts:
        if part not in STATIC_FAMILIES:
            return f"{part} has not been checked to be exact in fixed-shape graphs"
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


def default_placement(model: nn.Module) -> Placement:
    """Where tiles start if the user does not say: see `mlxspec.engine.placement`."""
    if not any("recurrent" in layer_kind(cache) for cache in make_prompt_cache(model)):
        return "free"
    return "anchored" if _ANCHORED_FAMILIES.issuperset(_families_inside(model)) else "aligned"


def starts_without_state(model: nn.Module) -> bool:
    """Whether its recurrent layers must be given no state before the first token, not zeros."""
    return not _WITHOUT_FIRST_STATE.isdisjoint(_families_inside(model))


def why_not_quantized(
    model: nn.Module, caches: Sequence[Any], quantization: KVQuantization, *, compute: bool = True
) -> str | None:
    """The reason this model cannot run on quantised keys and values, or None if it can.

    Args:
        model: The model.
        caches: mlx-lm's caches of it, one token in.
        quantization: The conversion asked for.
        compute: Run the forward too, after MLX has judged the shapes of its operations; False is
            for a model without weights.
    """
    kinds = {part for cache in caches for part in layer_kind(cache).split(" + ")}
    if "sliding window" in kinds:
        return "it has sliding-window layers, which mlx-lm cannot quantise either"
    if not any(hasattr(cache, "to_quantized") for cache in caches):
        return "it has no layer whose keys and values mlx-lm would quantise"
    try:
        options = {"group_size": quantization.group_size, "bits": quantization.bits}
        quantized = [
            cache.to_quantized(**options) if hasattr(cache, "to_quantized") else cache
            for cache in caches
        ]
        logits = model(mx.array([[0]]), cache=quantized)
        if compute:
            mx.eval(logits)
    except Exception as problem:
        # Head sizes that no group divides, attention sinks, attention of the model's own making.
        return f"mlx-lm cannot run it with {quantization}: {problem}"
    return None


def default_context_length(model: nn.Module, widest_tile: int) -> int:
    """The context length a model is used with when the user names none.

    Args:
        model: The model, with or without weights.
        widest_tile: Rows of the widest decode tile; a position table must have room for padding.
    """
    limit = context_limit(model, widest_tile)
    if limit is not None:
        return limit
    return declared_context_length(model) or _FALLBACK_CONTEXT_LENGTH


def checked_context_length(asked: int | None, model: nn.Module, widest_tile: int) -> int:
    """The context length that was asked for, or the default.

    Raises:
        ValueError: No whole number, below 2, or more than the model has positions for.
    """
    if asked is None:
        return default_context_length(model, widest_tile)
    asked = whole_number("max_context_length", asked, 2)
    limit = context_limit(model, widest_tile)
    if limit is not None and asked > limit:
        raise ValueError(
            f"max_context_length: this model has a table of positions with room for {limit} "
            f"tokens beside a tile of {widest_tile} rows, got {asked}"
        )
    return asked


def context_limit(model: nn.Module, widest_tile: int) -> int | None:
    """The longest context the model can have at all, or None where positions are rotations."""
    field = _LEARNED_POSITIONS.get(family_of(model))
    return None if field is None else getattr(model.args, field) - widest_tile


def declared_context_length(model: nn.Module) -> int | None:
    """What the config says, or the model's arguments where nobody has read its config."""
    args = getattr(model, "args", None)
    remembered: int | None = model.__dict__.get(_CONTEXT_ATTRIBUTE)
    return remembered or _declared_in(*(getattr(args, part, None) for part in _TEXT_PARTS), args)


def _declared_in(*holders: Any) -> int | None:
    """The first context length in these parts of a config: dictionaries, objects or None."""
    for holder in holders:
        for field in _CONTEXT_FIELDS:
            value = holder.get(field) if isinstance(holder, Mapping) else getattr(holder, field, 0)
            if isinstance(value, int) and value > 1:
                return value
    return None


def _families_inside(model: nn.Module) -> list[str]:
    """The families whose code the model is built of, its own first.

    Multimodal models hold the text model of another family.
    """
    names = dict.fromkeys(type(module).__module__ for _, module in model.named_modules())
    return [
        name.rpartition(".")[2]
        for name in names
        if name.startswith("mlx_lm.models.") and hasattr(sys.modules[name], "Model")
    ]
