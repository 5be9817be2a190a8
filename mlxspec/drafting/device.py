"""A proposal that the host has not read: it goes to the target as it left the draft model."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class DeviceDraft:
    """Guessed tokens on the device; `draft[:n]` is the first n of them.

    Attributes:
        tokens: int32 [k].
        scores: float32 [k, vocab] or None. Their softmax is the distribution that each token was
            drawn from, filters and temperature applied; None is a point mass.
        seconds: About how long the device works at them after the proposal was handed over.
    """

    tokens: mx.array
    scores: mx.array | None = None
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> DeviceDraft:
        return DeviceDraft(
            self.tokens[part], None if self.scores is None else self.scores[part], self.seconds
        )
