"""What a drafter answers, checked: tokens of the target, no more than were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxspec.drafting.device import DeviceDraft
from mlxspec.drafting.protocol import Drafter
from mlxspec.engine.tokens import TokenView, token_ids
from mlxspec.errors import DrafterError


def checked_proposal(
    drafter: Drafter, history: TokenView, budget: int, vocab_size: int
) -> list[int] | DeviceDraft:
    """Ask for a proposal, cut it to the budget, and refuse what is no token of the target.

    The ids of a draft on the device are not known yet: the engine refuses what is none.

    Raises:
        DrafterError: It is no flat sequence of ids of the target's vocabulary, or its scores
            are of another shape.
    """
    proposal: object = drafter.propose(history, budget)
    name = f"drafter {type(drafter).__name__}"
    try:
        if isinstance(proposal, DeviceDraft):
            _require_device_draft(name, proposal, vocab_size)
            return proposal[:budget] if len(proposal) and budget else []
        if not isinstance(proposal, Sequence | mx.array | np.ndarray) or (
            getattr(proposal, "ndim", 1) != 1
        ):
            raise TypeError(f"{name}: expected a sequence of token ids, got {proposal!r}")
        return token_ids(proposal[:budget], vocab_size, name)
    except (TypeError, ValueError) as problem:
        raise drafter_error(problem) from problem


def _require_device_draft(name: str, draft: DeviceDraft, vocab_size: int) -> None:
    """Refuse what is no array, or one of another shape; what it holds is not looked at."""
    tokens: object = draft.tokens
    if not isinstance(tokens, mx.array):
        raise TypeError(f"{name}: expected tokens on the device, int32 [k], got {tokens!r}")
    if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
        raise TypeError(f"{name}: expected tokens int32 [k], got {tokens.dtype} {tokens.shape}")
    if draft.scores is not None and draft.scores.shape != (len(tokens), vocab_size):
        raise TypeError(
            f"{name}: expected scores float32 {(len(tokens), vocab_size)}, a row of the target's "
            f"vocabulary for every token, got {draft.scores.shape}"
        )


def drafter_error(problem: object) -> DrafterError:
    """The error of a drafter that proposed something else than it should."""
    return DrafterError(
        f"{problem}. propose(history, budget) must return ids of the target's vocabulary"
    )
