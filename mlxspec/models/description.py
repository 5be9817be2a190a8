"""What a model's config.json tells about it: layers, sizes, and which engine takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from mlxspec.engine.placement import checked_tile_widths
from mlxspec.engine.spans import SpanRule
from mlxspec.engine.state import layer_kind
from mlxspec.engine.support import (
    default_context_length,
    default_placement,
    family_of,
    model_from_config,
    why_not_static,
)
from mlxspec.errors import UnsupportedModel
from mlxspec.models.loading import load_config


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same kind of state.

    Attributes:
        kind: Such as "full attention", "sliding window" or "recurrent".
        window: Keys a layer sees, for a sliding window; else None.
        count: Number of such layers.
    """

    kind: str
    window: int | None
    count: int


@dataclass(frozen=True)
class ModelDescription:
    """A model as its config describes it. None stands for what the config does not tell.

    Attributes:
        folder: Where the config lies.
        family: Module of mlx-lm that defines the model.
        layers: The kinds of layers, in the order in which they first come.
        heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer.
        vocabulary: Number of token ids.
        context_length: Most tokens the model is used with if the user names no limit.
        weights: dtype, or how the weights are quantised.
        size: Bytes of the weight files; None where they are not downloaded.
        engine: "static" or "dynamic".
        why_not_static: The reason, if the engine is the dynamic one.
        placement: Where the static engine starts tiles; None under the dynamic one.
        tile_widths: Rows of the static engine's decode tiles; None under the dynamic one.
    """

    folder: str
    family: str
    layers: tuple[LayerKind, ...]
    heads: int | None
    kv_heads: int | None
    vocabulary: int | None
    context_length: int
    weights: str
    size: int | None
    engine: str
    why_not_static: str | None
    placement: str | None
    tile_widths: tuple[int, ...] | None


def describe(folder: Path) -> ModelDescription:
    """Describe the model of a folder; none of its weights is read.

    Raises:
        ModelNotFound: There is no config.
        UnsupportedModel: mlx-lm cannot build a model from it.
    """
    config = load_config(folder)
    if code := config.get("model_file"):
        raise UnsupportedModel(
            f"{folder} brings its own code, {code}, without which its config tells nothing; only "
            "the dynamic engine takes it, with --trust-remote-code."
        )
    model = _structure(config, folder)
    reason = why_not_static(model)
    placement = None if reason else default_placement(model)
    widths = checked_tile_widths(None, placement, SpanRule.step) if placement else None
    return ModelDescription(
        folder=str(folder),
        family=family_of(model),
        layers=_layers(make_prompt_cache(model)),
        heads=_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads"),
        kv_heads=_number(
            config, "num_key_value_heads", "num_attention_heads", "n_head", "n_heads", "num_heads"
        ),
        vocabulary=_number(config, "vocab_size"),
        context_length=default_context_length(model, widths[-1] if widths else 1),
        weights=_weights(config),
        size=sum(path.stat().st_size for path in folder.glob("model*.safetensors")) or None,
        engine="dynamic" if reason else "static",
        why_not_static=reason,
        placement=placement,
        tile_widths=widths,
    )


def _structure(config: Mapping[str, Any], folder: Path) -> Any:
    try:
        return model_from_config(config)
    except Exception as error:  # whatever mlx-lm's model meets in a config that it was not made for
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UnsupportedModel(
            f"mlx-lm cannot build a model from {folder / 'config.json'}: {reason}"
        ) from error


def _layers(caches: Sequence[Any]) -> tuple[LayerKind, ...]:
    counts: dict[tuple[str, int | None], int] = {}
    for cache in caches:
        key = (layer_kind(cache), next(_windows(cache), None))
        counts[key] = counts.get(key, 0) + 1
    return tuple(LayerKind(kind, window, count) for (kind, window), count in counts.items())


def _windows(cache: Any) -> Iterator[int]:
    if isinstance(cache, CacheList):
        for part in cache.caches:
            yield from _windows(part)
    elif isinstance(cache, RotatingKVCache):
        yield cache.max_size


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of the entries that is there; those of a text model inside count as well."""
    inner = config.get("text_config")
    for name in names:
        for holder in (config, inner):
            value = holder.get(name) if isinstance(holder, Mapping) else None
            if isinstance(value, int):
                return value
    return None


def _weights(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization")
    dtype = config.get("torch_dtype") or config.get("dtype") or "of unknown dtype"
    if not quantization:
        return str(dtype)
    others: dict[int, int] = {}
    for entry in quantization.values():
        if isinstance(entry, Mapping) and entry.get("bits") != quantization.get("bits"):
            others[entry["bits"]] = others.get(entry["bits"], 0) + 1
    exceptions = "".join(
        f", {count} {'matrix' if count == 1 else 'matrices'} {bits}-bit"
        for bits, count in sorted(others.items())
    )
    return (
        f"{quantization.get('bits')}-bit {quantization.get('mode', 'affine')}, group "
        f"{quantization.get('group_size')}{exceptions}; the rest {dtype}"
    )
