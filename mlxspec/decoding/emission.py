"""What a decoder emits, and when a text ends."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlxspec.numbers import whole_number

FinishReason = Literal["stop", "length"]


class Emission(NamedTuple):
    """One emitted token.

    Attributes:
        token: Its id.
        from_draft: Whether a drafter had guessed it.
        logprobs: Its row of log-probabilities [vocab] in the logits' dtype, if the acceptance has
            them; lazy: nothing is computed unless it is used.
        finish_reason: "stop" after a stop token, "length" where `max_tokens` or the context ends,
            None before the last token.
    """

    token: int
    from_draft: bool
    logprobs: mx.array | None
    finish_reason: FinishReason | None


def finish_reason(token: int, stop_tokens: frozenset[int], wanted: int) -> FinishReason | None:
    """Whether the text ends with this token; a stop token wins over the limit.

    Args:
        token: The token emitted.
        stop_tokens: Ids that end the text.
        wanted: Tokens that may still follow it.
    """
    if token in stop_tokens:
        return "stop"
    return "length" if wanted <= 0 else None


def token_limit(max_tokens: Any) -> int:
    """The most tokens to emit, -1 for no limit, as an `int`.

    Raises:
        ValueError: It is no whole number, 0, or below -1.
    """
    try:
        limit = whole_number("max_tokens", max_tokens, -1)
    except ValueError:
        raise ValueError(
            f"max_tokens: expected a positive number, or -1 for no limit, got {max_tokens!r}"
        ) from None
    if limit == 0:
        raise ValueError("max_tokens: 0 would emit nothing; use -1 for no limit")
    return limit


def token_set(tokens: Collection[int] | mx.array | np.ndarray) -> frozenset[int]:
    """Token ids of any kind of whole number; those no model emits do no harm.

    Raises:
        ValueError: One is no whole number, or below 0.
    """
    values: Any = tokens.tolist() if isinstance(tokens, mx.array | np.ndarray) else tokens
    if values is None or hasattr(values, "__index__"):
        values = [] if values is None else [values]
    return frozenset(whole_number("stop_tokens", token, 0) for token in values)
