"""From a name to a loaded model: what can be wrong with it is said before a weight is read."""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx_lm.models
import mlx_lm.utils
from huggingface_hub import errors as hub_errors

from mlxspec.engine.support import remember_context_length
from mlxspec.errors import ModelNotFound, UnsupportedModel
from mlxspec.models.demo import cache_dir, demo_folder, is_ready, prepare
from mlxspec.models.registry import DemoModel, closest, demo_names, parse_demo_name
from mlxspec.models.vocabulary import remember_tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# What the hub is asked for before a model's weights.
_SMALL_FILES = [p for p in mlx_lm.utils.DEFAULT_ALLOW_PATTERNS if "safetensors" not in p]
# Any one of these lets transformers build a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
)


def load(
    path_or_name: str | Path,
    *,
    revision: str | None = None,
    adapter_path: str | Path | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    lazy: bool = False,
    return_config: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Any, ...]:
    """Load a demo model, a local folder or a model of the hub, as ``mlx_lm.load`` does.

    One thing more: the tokenizer's ``eos_token_ids`` are all that its own files, ``config.json``
    and ``generation_config.json`` name. mlx-lm lets the last replace what the second says.

    Args:
        path_or_name: See ``resolve``.
        revision: Branch, tag or commit of a hub model.
        adapter_path: Folder with LoRA adapters.
        tokenizer_config: Options for the tokenizer.
        model_config: Entries that replace those of ``config.json``.
        lazy: Leave the weights on disk until they are used.
        return_config: Return the config as a third item.
        trust_remote_code: Allow the model's folder to bring its own Python file.

    Returns:
        mlx-lm's model and ``TokenizerWrapper``, and the config if asked for.

    Raises:
        ModelNotFound: There is no such model, or a file of it or of the adapters is missing.
        UnsupportedModel: mlx-lm has no model of its type.
        DemoModelError: A demo model could not be prepared.
    """
    if adapter_path is not None and not (Path(adapter_path) / "adapter_config.json").is_file():
        raise ModelNotFound(
            f"There are no adapters in {adapter_path}: it has no adapter_config.json."
        )
    path = _resolve(path_or_name, revision, model_config or {}, trust_remote_code)
    model, tokenizer, config = mlx_lm.utils.load(
        str(path),
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=None if adapter_path is None else str(adapter_path),
        lazy=lazy,
        return_config=True,
        trust_remote_code=trust_remote_code,
    )
    remember_tokenizer(model, tokenizer)
    tokenizer.eos_token_ids.update(_declared_end_tokens(path, model_config or {}))
    remember_context_length(model, config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def resolve(
    path_or_name: str | Path,
    revision: str | None = None,
    *,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """The local folder of a model, complete and of a type mlx-lm knows; no weight is read.

    Args:
        path_or_name: A demo model (``smollm2``, ``smollm2:4bit``, ...), which is fetched and
            converted at the first use; a local folder (one with a demo model's name is written
            ``./smollm2``); or a hub id ``org/name``, which is downloaded: its config first, so
            that a model that cannot run costs no long download.
        revision: Branch, tag or commit of a hub model.
        check: Given the config, raises if this model is not wanted; called before the weights of
            a hub model are downloaded.

    Raises:
        ModelNotFound: There is no such model, or a file of it is missing.
        UnsupportedModel: mlx-lm has no model of its type.
        DemoModelError: A demo model could not be prepared.
        ValueError: A revision was given for something that has none.
    """
    return _resolve(path_or_name, revision, {}, True, check)


def config_folder(path_or_name: str | Path) -> Path:
    """A folder with the model's ``config.json``; no weight is downloaded or made for it.

    Args:
        path_or_name: As for ``resolve``; of a hub model the small files are downloaded.

    Raises:
        ModelNotFound: There is no such model, or it is a demo model that has not been fetched.
    """
    demo = parse_demo_name(path_or_name) if isinstance(path_or_name, str) else None
    if demo is not None:
        if not is_ready(*demo):
            raise ModelNotFound(not_fetched(*demo))
        return demo_folder(*demo)
    folder = Path(os.path.expanduser(path_or_name))
    if path_or_name and os.path.exists(folder):
        return folder
    return _download(_hub_id(path_or_name), None, _SMALL_FILES)


def not_fetched(model: DemoModel, variant: str | None) -> str:
    """The sentence for a demo model that is asked for and not there."""
    name = model.name if variant is None else f"{model.name}:{variant}"
    return (
        f"The demo model {name} is not in {cache_dir()}; `mlxspec models fetch {name}` puts it "
        "there."
    )


def load_config(path: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a model's folder, as mlx-lm reads it.

    Raises:
        ModelNotFound: The file is missing or is not a JSON object.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} is not a model: it has no config.json.")
    try:
        config = mlx_lm.utils.load_config(path)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelNotFound(f"{path / 'config.json'} is not a JSON object: {error}.") from error
    if not isinstance(config, dict):
        raise ModelNotFound(f"{path / 'config.json'} is not a JSON object but a list or a value.")
    return config


def _resolve(
    path_or_name: str | Path,
    revision: str | None,
    overrides: Mapping[str, Any],
    trust_remote_code: bool,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """``resolve``, with what ``load`` was told about the config and the model's own code."""
    check = check or (lambda config: None)
    demo = parse_demo_name(path_or_name) if isinstance(path_or_name, str) else None
    folder = Path(os.path.expanduser(path_or_name))
    if demo is not None or (path_or_name and os.path.exists(folder)):
        if revision is not None:
            raise ValueError(f"{path_or_name} is not on the hub, so revision has no meaning for it")
        if demo is not None:
            folder = prepare(*demo)
            check(load_config(folder))
            return folder
        check(_checked_config(folder, overrides, trust_remote_code))
        _check_weights(folder)
        return folder
    name = _hub_id(path_or_name)
    folder = _download(name, revision, _SMALL_FILES)
    check(_checked_config(folder, overrides, trust_remote_code))
    folder = _download(name, revision, mlx_lm.utils.DEFAULT_ALLOW_PATTERNS)
    _check_weights(folder)
    return folder


def _hub_id(path_or_name: str | Path) -> str:
    """The name as a hub id, or the error that it names nothing."""
    name = str(path_or_name)
    if isinstance(path_or_name, Path) or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"No model {name!r}{closest(name, demo_names())}: no such folder, no hub id "
            f"('org/name'), and not one of the demo models {', '.join(demo_names())}."
        )
    return name


def _checked_config(
    folder: Path, overrides: Mapping[str, Any], trust_remote_code: bool
) -> dict[str, Any]:
    """The config of a folder whose model and tokenizer mlx-lm can build; others are refused."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"{folder} is a file; a model is a folder with config.json, a tokenizer and "
            "model*.safetensors."
        )
    config = {**load_config(folder), **overrides}
    own_code = config.get("model_file")
    if own_code is None:
        _check_model_type(folder, config)
    elif not trust_remote_code:
        raise UnsupportedModel(
            f"{folder} brings its own code, {own_code}, for its architecture. If you trust it, "
            "pass trust_remote_code=True."
        )
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise ModelNotFound(
            f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there."
        )
    return config


def _check_model_type(folder: Path, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModel(f"{folder / 'config.json'} does not say its model_type.")
    get_classes = mlx_lm.utils._get_classes  # its rule is that of mlx_lm.load, renames included
    try:
        get_classes(dict(config))
    except (ValueError, AttributeError) as error:
        # ValueError also covers a module that exists and fails to import something else.
        cause = error.__cause__
        known = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
        if model_type in known and isinstance(cause, ImportError):
            raise UnsupportedModel(
                f"mlx-lm's model {model_type} cannot be imported: {cause}."
            ) from error
        raise UnsupportedModel(
            f"mlx-lm {mlx_lm.__version__} has no model of type "
            f"{model_type!r}{closest(model_type, known)}, which {folder / 'config.json'} asks for."
        ) from error


def _check_weights(folder: Path) -> None:
    """Refuse a folder without the files ``mlx_lm.load`` reads weights from."""
    index = folder / "model.safetensors.index.json"
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not present:
        others = sorted(p.name for g in ("*.bin", "*.pth", "*.gguf") for p in folder.glob(g))
        hint = f" ({others[0]} must be converted: `mlx_lm.convert`)" if others else ""
        raise ModelNotFound(f"{folder} has no weights: no model*.safetensors{hint}.")
    try:
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFound(f"{index} is not an index of weights: {error!r}.") from error
    if missing := sorted(wanted - present):
        raise ModelNotFound(
            f"{folder} lacks {len(missing)} of its {len(wanted)} weight files: "
            f"{', '.join(missing)}."
        )


def _declared_end_tokens(folder: Path, overrides: Mapping[str, Any]) -> set[int]:
    """The end tokens of both the config and the generation config: neither replaces the other."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | dict(overrides)
    try:
        text = (folder / "generation_config.json").read_text(encoding="utf-8")
        generation_config = json.loads(text)
    except (FileNotFoundError, ValueError):  # as mlx-lm, which reads on without it
        generation_config = {}
    tokens: set[int] = set()
    for holder in (config, config.get("text_config"), generation_config):
        declared = holder.get("eos_token_id") if isinstance(holder, dict) else None
        for token in declared if isinstance(declared, list) else [declared]:
            if isinstance(token, int) and not isinstance(token, bool):
                tokens.add(token)
    return tokens


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub model's folder, through whichever hub mlx-lm is set to."""
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(
            mlx_lm.utils.snapshot_download(name, revision=revision, allow_patterns=patterns)
        )
    except hub_errors.GatedRepoError as error:
        reason = "its owner wants terms accepted first: do so on its page and log in (`hf auth`)"
        raise ModelNotFound(f"The hub does not give out {name}: {reason}.") from error
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        raise ModelNotFound(
            f"No model {name!r}{at}: no such folder here, and none that the hub shows you. "
            f"The demo models are {', '.join(demo_names())}."
        ) from error
    except (hub_errors.HfHubHTTPError, hub_errors.OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelNotFound(
            f"{name} is no folder here, and the hub cannot be reached to download it: {reason}. "
            "Check the network, or give a local folder."
        ) from error
