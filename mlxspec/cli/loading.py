"""From the options to a model: its config is judged before one of its weights is read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlxspec.cli.exits import UsageError
from mlxspec.errors import MlxspecError, ModelNotFound, UnsupportedModel


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
    from mlxspec.models import load, resolve

    path = resolve(args.model, check=lambda config: _refuse_model(config, args))
    try:
        model, tokenizer = load(
            path,
            adapter_path=args.adapter_path,
            tokenizer_config={"trust_remote_code": args.trust_remote_code},
            model_config={"quantize_activations": args.quantize_activations},
            lazy=True,
            trust_remote_code=args.trust_remote_code,
        )
    except ValueError as problem:
        if isinstance(problem, MlxspecError):
            raise
        raise ModelNotFound(
            f"the weights of {path} do not fit its config.json: {problem}"
        ) from problem
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
    _refuse_vocabulary(config, args)
    if config.get("model_file"):
        if args.engine == "static":
            raise UnsupportedModel(
                "the static engine cannot run a model that brings its own code; give "
                "--engine dynamic --trust-remote-code if you trust it"
            )
        return
    try:
        structure = model_from_config(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise ModelNotFound(
            f"config.json does not describe a model that mlx-lm can build: "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    if args.engine == "static":
        require_static(structure)
    limit = context_limit(structure, _widest_tile(structure, args))
    if limit is not None and (args.max_context_length or 0) > limit:
        raise UsageError(
            f"--max-context-length: expected at most {limit}, as the model has a table of "
            f"positions, got {args.max_context_length}"
        )
    if args.kv_bits:
        _refuse_quantized_keys(structure, args)


def _refuse_vocabulary(config: Mapping[str, Any], args: Namespace) -> None:
    """Refuse options that count or name more tokens than the model has.

    mlx-lm's functions would fail inside a forward, or write past a row of logits.
    """
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if size is None:
        return
    if args.temp and args.top_k >= size:
        raise UsageError(
            f"--top-k: expected less than the {size} tokens of the model's vocabulary, got "
            f"{args.top_k}; 0 samples among all"
        )
    if args.temp and args.min_p and args.min_tokens_to_keep > size:
        raise UsageError(
            f"--min-tokens-to-keep: expected at most the {size} tokens of the model's "
            f"vocabulary, got {args.min_tokens_to_keep}"
        )
    for token in args.logit_bias or ():
        if token >= size:
            raise UsageError(
                f"--logit-bias: expected ids below the {size} tokens of the model's vocabulary, "
                f"got {token}"
            )


def _refuse_quantized_keys(structure: Any, args: Namespace) -> None:
    """Refuse --kv-bits for a model that cannot have it; nothing is computed."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlxspec.engine.state import KVQuantization
    from mlxspec.engine.support import default_placement, why_not_quantized

    unit = 1 if default_placement(structure) == "free" else _tile_widths(structure, args)[0]
    if args.quantized_kv_start > unit and args.quantized_kv_start % unit:
        raise UsageError(
            f"--quantized-kv-start: expected a multiple of {unit}, the narrowest width of this "
            f"model's tiles, got {args.quantized_kv_start}"
        )
    caches = make_prompt_cache(structure)
    structure(mx.array([[0]]), cache=caches)
    quantization = KVQuantization(args.kv_bits, args.kv_group_size)
    if reason := why_not_quantized(structure, caches, quantization, compute=False):
        raise UsageError(
            f"--kv-bits: this model's keys and values cannot be quantized: {reason}; leave it "
            "out, or give another --model"
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
    """Rows of the engine's widest forward but for prefill, from the model's structure."""
    return 1 if args.engine == "dynamic" else _tile_widths(model, args)[-1]


def _tile_widths(model: Any, args: Namespace) -> tuple[int, ...]:
    """The static engine's ladder for the model's structure, ascending."""
    from mlxspec.engine.placement import checked_tile_widths
    from mlxspec.engine.spans import SpanRule
    from mlxspec.engine.support import default_placement

    try:
        return checked_tile_widths(args.tile_widths, default_placement(model), SpanRule.step)
    except ValueError as problem:
        raise UsageError(f"--tile-widths: this model needs {problem}") from problem


def _quantized(quantization: Mapping[str, Any]) -> str:
    return f"quantized as {quantization.get('mode', 'affine')}" if quantization else "not quantized"
