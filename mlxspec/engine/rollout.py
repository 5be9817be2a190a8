"""A rollout: tokens that an engine chooses one after the other, and the host reads none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxspec.engine.state.model_state import Checkpoint


@dataclass(frozen=True)
class RolloutStep:
    """One chosen token, still on the device.

    Attributes:
        head: int32 [2, 1], the token and the NaN count of its row.
        logits: [1, vocab] in the model's dtype, if captured.
    """

    head: mx.array
    logits: mx.array | None

    @property
    def token(self) -> mx.array:
        """int32 [1]."""
        return self.head[0]


# Asked after every step, which is submitted by then, whether another one is wanted.
GoOn = Callable[[list[RolloutStep]], bool]


@dataclass(frozen=True)
class Rollout:
    """Tokens chosen on the device; all but the last of them are processed, none is history.

    Attributes:
        steps: One for every token.
        nan_counts: int32 [rows], of every row that was computed, padding included.
        end: One past the last slot that was written, padding included.
        checkpoints: Recurrent states past the cursor, by ascending position.
    """

    steps: list[RolloutStep]
    nan_counts: mx.array
    end: int
    checkpoints: list[Checkpoint]

    @property
    def processed(self) -> int:
        """How many of the tokens the state covers, and so how many can be kept."""
        return len(self.steps) - 1

    def ids(self, count: int) -> list[int]:
        """The first tokens, read from the device; that waits where they are not computed yet."""
        if not count:
            return []
        head: Any = mx.concatenate([step.token for step in self.steps[:count]]).tolist()
        return list(head)
