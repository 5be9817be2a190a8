"""Rows of a draft model's logits in the shape of the target's, and scored as they are."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxspec.decoding.sampling import Sampling


@dataclass(frozen=True)
class FittedScores:
    """Scores a draft model's rows as the target's are scored; implements `RowScores`.

    A row is cut or filled up with -inf to the target's vocabulary. Embeddings are padded to
    different sizes in models of one family, and MLX's generator draws other noise for another
    size: only rows of one size meet the same noise. And no id is chosen that the target lacks.

    Attributes:
        sampling: How the target chooses.
        vocab_size: Entries in a row of the target's logits.
    """

    sampling: Sampling
    vocab_size: int

    def __call__(self, logits: mx.array, positions: mx.array, noise_key: mx.array) -> mx.array:
        """See `RowScores`; float32 [rows, vocab_size]."""
        fitted = self.fitted(logits)
        if self.sampling.greedy:
            return fitted.astype(mx.float32)
        return self.sampling(fitted, positions, noise_key)

    def fitted(self, logits: mx.array) -> mx.array:
        """Rows [rows, any] as [rows, vocab_size], in their dtype."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        return logits[:, : self.vocab_size]
