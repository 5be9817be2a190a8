"""What the options must be together: tables of what is refused, and of what has no effect."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlxspec.chat_template import require_free_variables
from mlxspec.cli.exits import UsageError, warn
from mlxspec.cli.options import PENALTIES, Parser, flag, ngram_range
from mlxspec.cli.output import DraftStyle

# Options of mlx-lm whose feature is not there: the reason, and what to do.
_NOT_THERE = {
    "max_kv_size": "a state that forgets its oldest keys cannot be rewound; leave it out, or "
    "bound the memory with --max-context-length",
    "image": "images are not read yet; leave them out",
}
# Options that mean something only with at least one of others.
_DRAFTERS = ("prompt_lookup", "draft_model")
_GRAMMARS = ("json_schema", "regex")
_NEEDS_ONE_OF = {
    "prompt_lookup_min_ngram": ("prompt_lookup",),
    "prompt_lookup_max_ngram": ("prompt_lookup",),
    "draft_p_min": ("draft_model",),
    "num_draft_tokens": _DRAFTERS + _GRAMMARS,
    "adaptive_draft_count": _DRAFTERS + _GRAMMARS,
    "no_adaptive_draft_count": _DRAFTERS + _GRAMMARS,
    "no_align_proposals": _DRAFTERS + _GRAMMARS,
    "show_drafts": _DRAFTERS + _GRAMMARS,
    "acceptance": _DRAFTERS,
}
# Options that one of the engines cannot honour.
_REFUSED_BY_ENGINE = {
    "dynamic": {
        "prompt_lookup": "the dynamic engine decodes plainly, without speculation",
        "draft_model": "the dynamic engine decodes plainly, without speculation",
        "tile_widths": "the dynamic engine has no tiles",
        "no_exact": "the dynamic engine has no tiles",
        "kv_bits": "the dynamic engine keeps keys and values whole",
        "prompt_cache_file": "the dynamic engine's state is not written to files",
    },
    "static": {
        "quantize_activations": "the static engine is not known to be exact with it",
    },
}
_OTHER_ENGINE = {"dynamic": "static", "static": "dynamic"}

TEMPLATE_OPTIONS = ("system_prompt", "prefill_response", "chat_template_config")


@dataclass(frozen=True)
class _WithoutEffect:
    """Options that are accepted and do nothing, where `holds`, for one reason."""

    reason: str
    options: tuple[str, ...]
    holds: Callable[[Namespace], bool]


def _is_off(name: str) -> Callable[[Namespace], bool]:
    return lambda args: not getattr(args, name)


_WITHOUT_EFFECT = (
    _WithoutEffect(
        "with --tile-widths, which are taken as they are",
        ("no_exact",),
        lambda args: bool(args.tile_widths),
    ),
    _WithoutEffect(
        "the dynamic engine drafts nothing",
        (
            "num_draft_tokens",
            "adaptive_draft_count",
            "no_adaptive_draft_count",
            "no_align_proposals",
            "show_drafts",
        ),
        lambda args: args.engine == "dynamic",
    ),
    _WithoutEffect(
        "with --num-draft-tokens 0",
        ("adaptive_draft_count", "no_adaptive_draft_count"),
        lambda args: args.num_draft_tokens == 0,
    ),
    _WithoutEffect(
        "decoding is greedy",
        (
            "top_p",
            "min_p",
            "top_k",
            "xtc_probability",
            "xtc_threshold",
            "min_tokens_to_keep",
            "seed",
        ),
        lambda args: args.temp == 0,
    ),
    _WithoutEffect(
        "without --min-p", ("min_tokens_to_keep",), lambda args: args.temp > 0 and not args.min_p
    ),
    _WithoutEffect(
        "without --xtc-probability",
        ("xtc_threshold",),
        lambda args: args.temp > 0 and not args.xtc_probability,
    ),
    *(
        _WithoutEffect(
            f"without --{name}-penalty",
            (f"{name}_context_size",),
            _is_off(f"{name}_penalty"),
        )
        for name in PENALTIES
    ),
    _WithoutEffect(
        "without --kv-bits", ("kv_group_size", "quantized_kv_start"), _is_off("kv_bits")
    ),
    _WithoutEffect(
        "with --prompt-cache-file, which holds all that comes before the prompt",
        ("system_prompt",),
        lambda args: bool(args.prompt_cache_file) and not args.ignore_chat_template,
    ),
    _WithoutEffect(
        "with --ignore-chat-template", TEMPLATE_OPTIONS, lambda args: args.ignore_chat_template
    ),
    _WithoutEffect(
        "tokenizers have no default template any more",
        ("use_default_chat_template",),
        lambda args: True,
    ),
)


def refuse_combinations(parser: Parser, args: Namespace) -> None:
    """Refuse what cannot be honoured, or not together.

    Raises:
        UsageError: Names the option and what to do.
    """
    for name, reason in _NOT_THERE.items():
        if parser.given(args, name):
            raise UsageError(f"{flag(name)} {_written(getattr(args, name))}: {reason}")
    for name, needed in _NEEDS_ONE_OF.items():
        if parser.given(args, name) and not any(parser.given(args, other) for other in needed):
            offers = " or ".join(
                flag(other) for other in needed if hasattr(args, other) and other not in _NOT_THERE
            )
            raise UsageError(f"{flag(name)} needs {offers}: give both, or neither")
    for name, reason in _REFUSED_BY_ENGINE[args.engine].items():
        if parser.given(args, name):
            other = _OTHER_ENGINE[args.engine]
            raise UsageError(f"{flag(name)}: {reason}; leave it out, or give --engine {other}")
    if all(parser.given(args, name) for name in _GRAMMARS):
        raise UsageError(f"{' and '.join(map(flag, _GRAMMARS))}: give one of them, not both")
    if args.adaptive_draft_count and args.no_adaptive_draft_count:
        raise UsageError("--adaptive-draft-count and --no-adaptive-draft-count: give one of them")
    _refuse_rejection(parser, args)
    refuse_ngram_range(args)
    try:
        require_free_variables("--chat-template-config", args.chat_template_config or {})
    except ValueError as problem:
        raise UsageError(str(problem)) from None


def without_effect(parser: Parser, args: Namespace) -> list[str]:
    """For every reason that holds, the given options that do nothing because of it."""
    return [
        text
        for entry in _WITHOUT_EFFECT
        if entry.holds(args) and (text := idle(parser, args, entry.options, entry.reason))
    ]


def idle(parser: Parser, args: Namespace, options: Iterable[str], reason: str) -> str:
    """Those of the options that are given, with the reason why they do nothing; else nothing."""
    given = [flag(name) for name in options if parser.given(args, name)]
    return f"{', '.join(given)} ({reason})" if given else ""


def invisible_drafts(args: Namespace, style: DraftStyle | None) -> list[str]:
    """--show-drafts, where stdout cannot show them."""
    if not args.show_drafts or style is not None:
        return []
    return ["--show-drafts (stdout is no terminal with colours; FORCE_COLOR=1 colours it anyway)"]


def warn_of_idle(command: str, entries: Iterable[str]) -> None:
    """Name in one warning what has no effect, if anything has none."""
    named = [entry for entry in entries if entry]
    warn(command, f"without effect: {'; '.join(named)}" if named else "")


def _refuse_rejection(parser: Parser, args: Namespace) -> None:
    """Refuse the classic test where there is nothing to draw, or no distribution to compare."""
    if args.acceptance != "rejection":
        return
    if args.temp == 0:
        raise UsageError("--acceptance rejection needs --temp above 0: give both, or neither")
    for name in (*(f"{name}_penalty" for name in PENALTIES), "logit_bias"):
        if parser.given(args, name):
            raise UsageError(
                f"{flag(name)}: --acceptance rejection compares distributions before penalties; "
                "leave one of the two out"
            )
    for name in _GRAMMARS:
        if parser.given(args, name):
            raise UsageError(
                f"{flag(name)}: --acceptance rejection needs the drafter's own distribution, which "
                "a grammar cuts; leave one of the two out"
            )


def refuse_ngram_range(args: Namespace) -> None:
    """Refuse a match that would have to be longer than it may be.

    Raises:
        UsageError: Names both options.
    """
    least, most = ngram_range(args)
    if least > most:
        raise UsageError(
            f"--prompt-lookup-min-ngram: expected at most --prompt-lookup-max-ngram, which is "
            f"{most}, got {least}; lower the first or raise the second"
        )


def _written(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
