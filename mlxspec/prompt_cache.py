"""Prompt cache files: what an engine holds of a text, for the next process to go on from.

A file is safetensors: the tokens, keys and values without padding, recurrent states. Its metadata
says in JSON whose they are (model, quantisation), and a checksum over all of it tells damage. It
holds nothing of what was drafted: plain decoding would have written the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlxspec._version import __version__
from mlxspec.engine.identity import ModelIdentity, identity_of, raw_bytes
from mlxspec.engine.protocol import SpeculativeEngine
from mlxspec.engine.state import StateImage
from mlxspec.engine.state.model_state import Checkpoint
from mlxspec.engine.static import StaticShapeEngine
from mlxspec.engine.tokens import token_ids
from mlxspec.errors import PromptCacheError
from mlxspec.mlx_lm_cache import image_from_mlx_lm, is_mlx_lms
from mlxspec.whole_files import replacing

FORMAT = "mlxspec prompt cache"
VERSION = 1
_TOKENS = "tokens"


@dataclass(frozen=True)
class PromptCacheHeader:
    """What a file says of itself before any of its numbers is read.

    Attributes:
        model: The model it was made with.
        quantization: `kv_bits`, `kv_group_size` and `quantized_kv_start` of its engine; None where
            keys and values were kept whole.
        token_count: Tokens it covers.
        content: All else that is needed to read the arrays.
        metadata: What the caller of `save_prompt_cache` added.
    """

    model: ModelIdentity
    quantization: dict[str, int] | None
    token_count: int
    content: dict[str, Any]
    metadata: dict[str, str]


def save_prompt_cache(
    file_name: str | Path, engine: SpeculativeEngine, metadata: Mapping[str, str] | None = None
) -> None:
    """Write what an engine holds of its text: every token but the newest emitted one.

    Args:
        file_name: Replaced when the new file is complete; until then it is as it was, also if the
            process is killed.
        engine: A static engine that nobody is generating with.
        metadata: Texts to keep with it.

    Raises:
        PromptCacheError: An engine whose state cannot be written, or that holds nothing.
        ValueError: Metadata that are not texts by names.
        EngineBusy: Somebody is generating with the engine.
        OSError: The file cannot be written.
    """
    static = _static(engine)
    if not _texts_by_name(metadata := dict(metadata or {})):
        raise ValueError(f"metadata: expected texts by names, got {metadata!r}")
    with static.lease():
        image = static.image()
    if not image.tokens:
        raise PromptCacheError("the engine holds no tokens, so there is nothing to save")
    arrays = {_TOKENS: mx.array(image.tokens, mx.int32)}
    arrays |= {f"slots.{index}": array for index, array in enumerate(image.slots)}
    for number, checkpoint in enumerate(image.checkpoints):
        arrays |= {f"state.{number}.{i}": array for i, array in enumerate(checkpoint.arrays)}
    content = json.dumps(
        {
            "mlxspec": __version__,
            "model": identity_of(static.model).as_dict(),
            "quantization": _quantization(static),
            "token_count": len(image.tokens),
            "is_quantized": image.is_quantized,
            "first": image.first,
            "checkpoints": [checkpoint.position for checkpoint in image.checkpoints],
            "pinned": image.pinned,
            "reached": image.reached,
            "metadata": metadata,
        }
    )
    described = {"format": FORMAT, "version": str(VERSION), "content": content}
    described["checksum"] = _checksum(content, arrays)
    with replacing(Path(file_name)) as scratch, open(scratch, "wb") as file:
        mx.save_safetensors(file, arrays, described)


def load_prompt_cache(
    file_name: str | Path,
    engine: SpeculativeEngine,
    *,
    prompt: Sequence[int] | mx.array | None = None,
) -> dict[str, str]:
    """Let an engine hold what a file holds; a prompt that begins so then reuses it.

    Args:
        file_name: Written by `save_prompt_cache`, or by mlx-lm's function of that name.
        engine: A static engine of the same model and quantisation, which nobody is generating
            with. Its context length and the widths of its tiles may be others.
        prompt: Token ids that the file covers. mlx-lm does not write them, so its files cannot be
            read without; they are compared with the keys in the file.

    Returns:
        The texts that were kept with it.

    Raises:
        PromptCacheError: The file is none, is damaged, or belongs to another model, another
            quantisation or a later version. The engine is as it was.
        EngineBusy: Somebody is generating with the engine.
        OSError: The file cannot be read.
    """
    static = _static(engine)
    path = Path(file_name)
    header = read_prompt_cache_header(path)
    with static.lease():
        if header is None:
            image, metadata = image_from_mlx_lm(path, static, prompt)
        else:
            refuse_other_quantization(path, header, _quantization(static))
            if difference := header.model.difference(identity_of(static.model)):
                raise PromptCacheError(f"{path} was made with {difference}")
            image, metadata = _read(path, header), header.metadata
            asked = None if prompt is None else token_ids(prompt, static.vocab_size, "prompt")
            if asked not in (None, image.tokens):
                raise PromptCacheError(f"{path} covers other tokens than the prompt given")
        try:
            static.restore(image)
        except (TypeError, ValueError) as problem:
            raise PromptCacheError(f"{path} cannot be gone on from: {problem}") from problem
    return metadata


def read_prompt_cache_header(file_name: str | Path) -> PromptCacheHeader | None:
    """What a file says of itself; None for one of mlx-lm's. Neither model nor engine is needed.

    Raises:
        PromptCacheError: The file is no prompt cache, is cut off, or of a later version.
        OSError: It cannot be read.
    """
    path = Path(file_name)
    with open(path, "rb"):
        # For its OSError, which names the file.
        pass
    try:
        with safe_open(path, framework="numpy") as file:
            described = file.metadata() or {}
    except (SafetensorError, ValueError) as problem:
        raise PromptCacheError(
            f"{path} is no prompt cache, or only a part of one: expected a safetensors file "
            f"({problem})"
        ) from problem
    if is_mlx_lms(described):
        return None
    if described.get("format") != FORMAT:
        raise PromptCacheError(
            f"{path} is no prompt cache: expected a file of `mlxspec cache-prompt` or "
            "save_prompt_cache, got other safetensors"
        )
    if described.get("version") != str(VERSION):
        raise PromptCacheError(
            f"{path} is a prompt cache of version {described.get('version')}, and this mlxspec "
            f"({__version__}) reads version {VERSION}; make it again, or use the one that made it"
        )
    try:
        content = json.loads(described["content"])
        if not (
            isinstance(content["token_count"], int)
            and isinstance(content["quantization"], dict | None)
            and _texts_by_name(content["metadata"])
        ):
            raise TypeError
        return PromptCacheHeader(
            ModelIdentity(**content["model"]),
            content["quantization"],
            content["token_count"],
            content | {"checksum": described["checksum"], "text": described["content"]},
            content["metadata"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise PromptCacheError(
            f"{path} is damaged: its header does not say what it should"
        ) from problem


def refuse_other_quantization(
    path: Path, header: PromptCacheHeader, asked: Mapping[str, int] | None
) -> None:
    """Refuse a file whose keys and values were kept in another way than asked.

    Raises:
        PromptCacheError: Says both ways.
    """
    if header.quantization != asked:
        raise PromptCacheError(
            f"{path} was made {_in_words(header.quantization)}, and this engine runs "
            f"{_in_words(asked)}; give the same options, or make the file again"
        )


def _read(path: Path, header: PromptCacheHeader) -> StateImage:
    """The arrays of a file, compared with its checksum."""
    content = header.content
    try:
        loaded: Any = mx.load(str(path), format="safetensors")
        checksum = _checksum(content["text"], loaded)
    except RuntimeError as problem:
        raise PromptCacheError(f"{path} cannot be read to its end: {problem}") from problem
    if checksum != content["checksum"]:
        raise PromptCacheError(
            f"{path} is damaged: its checksum is another than when it was written; make it again"
        )
    try:
        states: list[list[mx.array]] = [[] for _ in content["checkpoints"]]
        for number, arrays in enumerate(states):
            while (name := f"state.{number}.{len(arrays)}") in loaded:
                arrays.append(loaded[name])
        return StateImage(
            tokens=loaded[_TOKENS].tolist(),
            is_quantized=content["is_quantized"],
            slots=[loaded[f"slots.{index}"] for index in range(len(content["first"]))],
            first=content["first"],
            checkpoints=[Checkpoint(*c) for c in zip(content["checkpoints"], states, strict=True)],
            pinned=content["pinned"],
            reached=content["reached"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise PromptCacheError(
            f"{path} does not hold what its header says: {type(problem).__name__} {problem}"
        ) from problem


def _checksum(content: str, arrays: Mapping[str, mx.array]) -> str:
    checksum = hashlib.sha256(content.encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum.update(f"{name} {array.dtype} {array.shape}".encode())
        checksum.update(raw_bytes(array))
    return checksum.hexdigest()


def _static(engine: SpeculativeEngine) -> StaticShapeEngine:
    if not isinstance(engine, StaticShapeEngine):
        raise PromptCacheError(
            f"expected a StaticShapeEngine, got a {type(engine).__name__}: only its state is "
            "written to files and read from them"
        )
    if not engine.weights_unchanged:
        raise PromptCacheError(
            "the model's weights have changed since the engine was made, which still runs the old "
            "ones; make a new engine"
        )
    return engine


def _quantization(engine: StaticShapeEngine) -> dict[str, int] | None:
    if engine.kv_quantization is None or engine.quantized_from is None:
        return None
    return {
        "kv_bits": engine.kv_quantization.bits,
        "kv_group_size": engine.kv_quantization.group_size,
        "quantized_kv_start": engine.quantized_from,
    }


def _texts_by_name(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(
        isinstance(text, str) for entry in metadata.items() for text in entry
    )


def _in_words(quantization: Mapping[str, int] | None) -> str:
    if quantization is None:
        return "without kv_bits"
    return "with " + ", ".join(f"{name}={value}" for name, value in quantization.items())
