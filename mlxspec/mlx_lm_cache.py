"""mlx-lm's own prompt cache files, read as far as their layers allow.

They do not say which tokens they cover. A history with holes would mislead drafters, processors
and the next turn, so the tokens have to be given, and are compared with the keys in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
)

from mlxspec.engine.state import StateImage
from mlxspec.engine.state.model_state import Checkpoint
from mlxspec.engine.static import StaticShapeEngine
from mlxspec.engine.tokens import token_ids
from mlxspec.errors import PromptCacheError

_READ = {
    kind.__name__: kind
    for kind in (ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache)
}
# How far a key may lie from the one of its token, as a part of its length: what rounding and
# quantisation do to it. Keys of two tokens are about as far from each other as they are long.
_ROUNDING = 0.2
_QUANTISED = 0.6


def is_mlx_lms(described: Mapping[str, str]) -> bool:
    """Whether metadata of safetensors are those of mlx-lm's `save_prompt_cache`."""
    # A flattened list of the caller's texts, the classes of the caches, and the scalars.
    return "1.0" in described and "2.0" in described


def image_from_mlx_lm(
    path: Path, engine: StaticShapeEngine, prompt: Sequence[int] | mx.array | None
) -> tuple[StateImage, dict[str, str]]:
    """An image of what a file of mlx-lm's holds, and the texts that were kept with it.

    Raises:
        PromptCacheError: No prompt, another than the file's, another model's file, or layers that
            cannot be gone on from.
    """
    if prompt is None:
        raise PromptCacheError(
            f"{path} is mlx-lm's, which does not say which tokens it covers: give them as prompt=, "
            "or make the file again with `mlxspec cache-prompt`"
        )
    tokens = token_ids(prompt, engine.vocab_size, "prompt")
    try:
        caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        mx.eval([cache.state for cache in caches])
    except Exception as problem:  # whatever mlx-lm's reader meets in a damaged file
        raise PromptCacheError(f"{path} cannot be read as mlx-lm's: {problem!r}") from problem
    leaves = list(_leaves(caches))
    for leaf in leaves:
        if type(leaf).__name__ not in _READ:
            raise PromptCacheError(
                f"{path} has a {type(leaf).__name__}, which cannot be gone on from"
            )
        if isinstance(leaf, RotatingKVCache) and leaf.keep:
            raise PromptCacheError(
                f"{path} was made with --max-kv-size: it keeps the first {leaf.keep} tokens and "
                "forgets others, and cannot be gone on from"
            )
    fresh = list(_leaves(make_prompt_cache(engine.model)))
    if len(fresh) != len(leaves) or any(
        _kind(one) is not _kind(other) for one, other in zip(fresh, leaves, strict=True)
    ):
        raise PromptCacheError(f"{path} was made with a model of other layers than this one")
    counts = {leaf.offset for leaf in leaves if not isinstance(leaf, ArraysCache)} or {len(tokens)}
    if counts != {len(tokens)}:
        raise PromptCacheError(
            f"{path} covers {max(counts)} tokens, and the prompt given has {len(tokens)}"
        )
    _refuse_other_prompt(path, engine, leaves, tokens)
    slots: list[mx.array] = []
    first: list[int] = []
    recurrent: list[mx.array] = []
    for leaf in leaves:
        if isinstance(leaf, ArraysCache):
            recurrent += [array for array in leaf.cache if array is not None]
            continue
        arrays = _held(leaf)
        slots += arrays
        first += [len(tokens) - arrays[0].shape[2]] * len(arrays)
    quantized = any(isinstance(leaf, QuantizedKVCache) for leaf in leaves)
    quantization = engine.kv_quantization
    if quantized and (
        quantization is None
        or any(
            (leaf.bits, leaf.group_size) != (quantization.bits, quantization.group_size)
            for leaf in leaves
            if isinstance(leaf, QuantizedKVCache)
        )
    ):
        raise PromptCacheError(
            f"{path} has quantised keys and values, and this engine has not, or others; make the "
            "engine with the same kv_bits and kv_group_size"
        )
    checkpoints = [Checkpoint(len(tokens), recurrent)] if recurrent else []
    pinned = len(tokens) if recurrent else 0
    image = StateImage(tokens, quantized, slots, first, checkpoints, pinned, len(tokens))
    return image, dict(metadata) if isinstance(metadata, Mapping) else {}


def _refuse_other_prompt(
    path: Path, engine: StaticShapeEngine, leaves: list[Any], tokens: list[int]
) -> None:
    """Compare the first keys of the model for these tokens with those of the file.

    MLX computes only what is evaluated: for keys of the first layer, no attention at all.
    """
    caches = make_prompt_cache(engine.model)
    engine.model(mx.array([tokens]), cache=caches)
    fresh = list(_leaves(caches))
    index = next((i for i, leaf in enumerate(leaves) if not isinstance(leaf, ArraysCache)), None)
    if index is None:
        ours, theirs = fresh[0].cache[0], leaves[0].cache[0]
        bound = _ROUNDING
    else:
        leaf = leaves[index]
        ours, theirs = fresh[index].keys[:, :, : len(tokens)], _held(leaf)[0]
        bound = _ROUNDING
        if isinstance(leaf, QuantizedKVCache):
            packed, scales, biases = _held(leaf)[:3]
            theirs = mx.dequantize(
                packed, scales, biases, group_size=leaf.group_size, bits=leaf.bits
            )
            bound = _QUANTISED
        ours = ours[:, :, -theirs.shape[2] :]
    if ours.shape != theirs.shape:
        raise PromptCacheError(f"{path} was made with a model of other sizes than this one")
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    distance = mx.linalg.norm(ours - theirs, axis=-1) / (mx.linalg.norm(ours, axis=-1) + 1e-6)
    if bool((distance.max() > bound).item()):
        raise PromptCacheError(
            f"{path} was made with other tokens than the prompt given, or with another model"
        )


def _held(cache: Any) -> list[mx.array]:
    """Keys and values of the newest positions that a cache holds, in their order."""
    if isinstance(cache, QuantizedKVCache):
        return [part[:, :, : cache.offset] for pair in (cache.keys, cache.values) for part in pair]
    if isinstance(cache, RotatingKVCache):
        return [
            cache._temporal_order(array)[:, :, -cache.offset :]
            for array in (cache.keys, cache.values)
        ]
    return [cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]]


def _kind(cache: Any) -> type:
    return KVCache if isinstance(cache, QuantizedKVCache) else type(cache)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache
