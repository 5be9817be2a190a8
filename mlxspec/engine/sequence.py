"""What every engine has: one model, one history, its counters, and one user at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager

import mlx.nn as nn

from mlxspec.engine.exclusive import Exclusive
from mlxspec.engine.tokens import TokenView


class OneSequence:
    """The part of `SpeculativeEngine` that does not depend on how the model is run.

    Args:
        model: The model that is run.
        vocab_size: Entries in a row of its logits.
        max_context_length: Most tokens of the sequence.
    """

    def __init__(self, model: nn.Module, vocab_size: int, max_context_length: int):
        self.model = model
        self._vocab_size = vocab_size
        self._context_length = max_context_length
        self._history: list[int] = []
        self._exclusive = Exclusive()
        self._forward_count = 0
        self._prefill_forward_count = 0
        # What a user should know of how the engine runs, by what it is about.
        self._notes: dict[str, str] = {}
        self.why_no_speculation: str | None = None

    @property
    def vocab_size(self) -> int:
        """Entries in a row of logits; every token id lies below it."""
        return self._vocab_size

    @property
    def max_context_length(self) -> int:
        """Most tokens a sequence may have, prompt and output; the last is never processed."""
        return self._context_length

    @property
    def note(self) -> str | None:
        """What a user should know of how the engine runs, or None."""
        return "; ".join(self._notes.values()) or None

    @property
    def tokens(self) -> TokenView:
        """The history: every token the state covers, as a read-only view."""
        return TokenView(self._history)

    @property
    def call_count(self) -> int:
        """Calls so far of the methods that `one_call` guards."""
        return self._exclusive.call_count

    @property
    def forward_count(self) -> int:
        """Decode forwards since the engine was made."""
        return self._forward_count

    @property
    def prefill_forward_count(self) -> int:
        """Prefill forwards since the engine was made."""
        return self._prefill_forward_count

    @property
    def leased(self) -> bool:
        """Whether somebody is generating with this engine now."""
        return self._exclusive.leased

    def lease(self) -> AbstractContextManager[None]:
        """Hold the engine for one sequence; a second holder gets `EngineBusy`."""
        return self._exclusive.lease()
