"""What a draft model is told of the target: how it chooses, so that both choose alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from mlxspec.decoding.sampling import Sampling


@dataclass(frozen=True)
class TargetChoice:
    """How the target's tokens are chosen.

    Attributes:
        vocab_size: Entries in a row of its logits.
        sampling: Temperature and filters.
        noise_key: uint32 [2], of the noise at every position; None where nothing is drawn.
        compares_distributions: Whether the acceptance wants to know the distribution that a draft
            was drawn from.
    """

    vocab_size: int
    sampling: Sampling = field(default_factory=Sampling)
    noise_key: mx.array | None = None
    compares_distributions: bool = False
