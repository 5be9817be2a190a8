"""From the options to a model: its config is judged before one of its weights is read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlxspec.cli.exits import UsageError
from mlxspec.errors import UnsupportedModel


class Loaded(NamedTuple):
    """A model that the options can be used with.

    Attributes:
        model: mlx-lm's model; its weights are read when they are first used.
        tokenizer: mlx-lm's wrapper, with the extra end tokens.
        context_length: Most tokens of prompt and answer together.
    """

    model: Any
    tokenizer: Any
    context_length: int


def load_for(args: Namespace) -> Loaded:
    """Find the model, refuse it if its config tells that it cannot run, and load it.

    Raises:
        MlxspecError: No such model, one that the engine cannot take, or options that the model
            does not go with.
    """
    from mlxspec.engine.support import default_context_length
    from mlxspec.models import load, load_config, resolve

    path = resolve(args.model)
    config = load_config(path)
    _refuse_model(config, args)
    model, tokenizer = load(
        path,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        lazy=True,
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        _add_end_token(tokenizer, token)
    context_length = args.max_context_length or default_context_length(
        model, _widest_tile(model, args)
    )
    return Loaded(model, tokenizer, context_length)


def _refuse_model(config: Mapping[str, Any], args: Namespace) -> None:
    """Refuse by its config a model that the engine or an option cannot take."""
    from mlxspec.engine.support import context_limit, model_from_config, require_static

    quantization = config.get("quantization") or {}
    if args.quantize_activations and quantization.get("mode") not in ("nvfp4", "mxfp8"):
        raise UsageError(
            "--quantize-activations: expected a model quantized as nvfp4 or mxfp8, got one "
            f"{_quantized(quantization)}; leave it out, or give another --model"
        )
    if config.get("model_file"):
        if args.engine == "static":
            raise UnsupportedModel(
                "the static engine cannot run a model that brings its own code; give "
                "--engine dynamic --trust-remote-code if you trust it"
            )
        return
    structure = model_from_config(config)
    if args.engine == "static":
        require_static(structure)
    limit = context_limit(structure, _widest_tile(structure, args))
    if limit is not None and (args.max_context_length or 0) > limit:
        raise UsageError(
            f"--max-context-length: expected at most {limit}, as the model has a table of "
            f"positions, got {args.max_context_length}"
        )


def _add_end_token(tokenizer: Any, token: str) -> None:
    try:
        tokenizer.add_eos_token(token)
        known = token.isdecimal() or token in tokenizer.get_vocab()
    except ValueError:
        known = False
    if not known:
        raise UsageError(
            f"--extra-eos-token: expected a token of the model's vocabulary or its id, got "
            f"{token!r}"
        )


def _widest_tile(model: Any, args: Namespace) -> int:
    """Rows of the engine's widest decode tile, from the model's structure."""
    from mlxspec.engine.placement import checked_tile_widths
    from mlxspec.engine.spans import SpanRule
    from mlxspec.engine.support import default_placement

    if args.engine == "dynamic":
        return 1
    try:
        return checked_tile_widths(args.tile_widths, default_placement(model), SpanRule.step)[-1]
    except ValueError as problem:
        raise UsageError(f"--tile-widths: this model needs {problem}") from problem


def _quantized(quantization: Mapping[str, Any]) -> str:
    return f"quantized as {quantization.get('mode', 'affine')}" if quantization else "not quantized"
