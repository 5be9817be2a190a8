"""From options to keyword arguments of the generation, for every command that generates."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from mlxspec.cli.loading import Loaded
from mlxspec.cli.options import lookup_drafter
from mlxspec.cli.sampling import sampling_arguments


def engine_arguments(args: Namespace, loaded: Loaded) -> dict[str, Any]:
    """How the model is run: what an engine is made with; None is its default."""
    quantization = ("kv_bits", "kv_group_size", "quantized_kv_start") if args.kv_bits else ()
    return {
        "max_context_length": loaded.context_length,
        "tile_widths": args.tile_widths,
        "exact": False if args.no_exact else None,
        "prefill_step_size": args.prefill_step_size,
        # The other two mean nothing without --kv-bits.
        **{name: getattr(args, name) for name in quantization},
    }


def decoding_arguments(args: Namespace, loaded: Loaded) -> dict[str, Any]:
    """How tokens are drafted and chosen, whichever engine runs the model."""
    return {
        "drafter": _drafter(args, loaded),
        "num_draft_tokens": args.num_draft_tokens,
        "adaptive_draft_count": _adaptive(args),
        "align_proposals": not args.no_align_proposals,
        "stop_strings": args.stop,
        **sampling_arguments(args, loaded.tokenizer),
    }


def _drafter(args: Namespace, loaded: Loaded) -> Any:
    """The drafter that the options ask for: lookup first, a model where it finds nothing."""
    from mlxspec.drafting import Chain, DraftModel

    lookup = lookup_drafter(args)
    if loaded.draft_model is None:
        return lookup
    exact = False if args.no_exact else None
    model = DraftModel(loaded.draft_model, p_min=args.draft_p_min, exact=exact)
    return model if lookup is None else Chain(lookup, model)


def _adaptive(args: Namespace) -> bool | None:
    """Whether to draft as many tokens as pay; None: unless their number is given."""
    if args.adaptive_draft_count:
        return True
    return False if args.no_adaptive_draft_count else None
