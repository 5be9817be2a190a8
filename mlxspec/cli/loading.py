"""From the options to a model: its config is judged before one of its weights is read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlxspec.cli.exits import UsageError, warn
from mlxspec.errors import MlxspecError, ModelNotFound, UnsupportedModel


class Loaded(NamedTuple):
    """A model that the options can be used with.

    Attributes:
        model: mlx-lm's model; its weights are read when they are first used.
        tokenizer: mlx-lm's wrapper, with the extra end tokens.
        context_length: Most tokens of prompt and answer together.
        draft_model: mlx-lm's model that drafts, of the same vocabulary, or None.
    """

    model: Any
    tokenizer: Any
    context_length: int
    draft_model: Any = None


def load_for(
    args: Namespace, draft_name: str | None = None, check: Callable[[Any], None] | None = None
) -> Loaded:
    """Find the models, refuse them if their configs tell that they cannot run, and load them.

    Args:
        args: The options.
        draft_name: The model that is to draft in a static engine, if there is one.
        check: Called with the model's structure, which has no weights yet; raises to refuse it.

    Raises:
        MlxspecError: No such model, one that the engine cannot take, options that the model does
            not go with, or a draft model of another vocabulary.
    """
    from mlxspec.engine.support import declared_context_length, default_context_length
    from mlxspec.models import resolve
    from mlxspec.models.vocabulary import require_same_tokens

    path = resolve(args.model, check=lambda config: _refuse_model(config, args, check))
    draft_path = resolve(draft_name, check=_refuse_draft) if draft_name else None
    model, tokenizer = _loaded(
        path,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    draft_model = None
    if draft_path is not None:
        draft_model, draft_tokenizer = _loaded(draft_path)
        require_same_tokens(tokenizer, draft_tokenizer)
    for token in args.extra_eos_token:
        _add_end_token(tokenizer, token)
    context_length = args.max_context_length or default_context_length(
        model, _widest_tile(model, args)
    )
    declared = declared_context_length(model)
    if declared and (args.max_context_length or 0) > declared:
        warn(
            "mlxspec",
            f"--max-context-length: the model's config declares {declared} tokens, got "
            f"{context_length}; past what it was made for a model may write nonsense",
        )
    return Loaded(model, tokenizer, context_length, draft_model)


def _loaded(path: Path, **settings: Any) -> tuple[Any, Any]:
    """A model whose weights are read when they are used, and its tokenizer."""
    from mlxspec.models import load

    try:
        model, tokenizer = load(path, lazy=True, **settings)
    except ValueError as problem:
        if isinstance(problem, MlxspecError):
            raise
        raise ModelNotFound(
            f"the weights of {path} do not fit its config.json: {problem}"
        ) from problem
    return model, tokenizer


def _refuse_draft(config: Mapping[str, Any]) -> None:
    """Refuse by its config a draft model that has to run in a static engine and cannot."""
    from mlxspec.engine.support import require_static

    try:
        if config.get("model_file"):
            raise UnsupportedModel("it brings its own code, which a static engine cannot run")
        require_static(_structure(config))
    except MlxspecError as problem:
        raise UnsupportedModel(
            f"--draft-model: {problem}; take another one, or --prompt-lookup"
        ) from problem


def _refuse_model(
    config: Mapping[str, Any], args: Namespace, check: Callable[[Any], None] | None
) -> None:
    """Refuse by its config a model that the engine or an option cannot take."""
    from mlxspec.engine.support import context_limit, require_static

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
    structure = _structure(config)
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
    if check is not None:
        check(structure)


def _structure(config: Mapping[str, Any]) -> Any:
    from mlxspec.engine.support import model_from_config

    try:
        return model_from_config(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
        raise ModelNotFound(
            f"config.json does not describe a model that mlx-lm can build: "
            f"{type(problem).__name__}: {problem}"
        ) from problem


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
