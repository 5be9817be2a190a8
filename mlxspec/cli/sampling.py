"""From the sampling options to what the generation takes, as mlx-lm's command makes it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mlxspec.cli.options import PENALTIES

_SAMPLING = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability")


def sampling_arguments(args: Namespace, tokenizer: Any) -> dict[str, Any]:
    """How tokens are chosen, as keyword arguments of `stream_generate`.

    What greedy decoding ignores is left out: the command has named it already.
    """
    arguments: dict[str, Any] = {"logits_processors": _processors(args)}
    if args.temp == 0:
        return arguments
    arguments |= {name: getattr(args, name) for name in _SAMPLING}
    arguments |= {"seed": args.seed, "acceptance": args.acceptance}
    if args.xtc_probability:
        arguments["xtc_threshold"] = args.xtc_threshold
        special = {*tokenizer.encode("\n"), *tokenizer.eos_token_ids}
        arguments["xtc_special_tokens"] = tuple(sorted(special))
    return arguments


def _processors(args: Namespace) -> list[Any]:
    """mlx-lm's own functions for the bias and the penalties, those that are asked for."""
    from mlx_lm.sample_utils import make_logits_processors

    options = {
        f"{name}_{part}": getattr(args, f"{name}_{part}")
        for name in PENALTIES
        for part in ("penalty", "context_size")
    }
    return make_logits_processors(args.logit_bias, **options)
