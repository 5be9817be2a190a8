"""An engine whose model says what a script says: decoders and texts are tested without a model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxspec.engine import Capture, VerifyRows
from mlxspec.engine.exclusive import Exclusive
from mlxspec.engine.tokens import TokenView, token_ids


class ScriptedEngine:
    """Implements `SpeculativeEngine` for one text: after its first n tokens comes the next one.

    After any other tokens comes id 0, as a model would say something or other.

    Args:
        script: The prompt and what follows it.
        vocab_size: Ids lie below it.
        width: Rows of the widest tile.
    """

    trace_count = 0
    compiled = True
    why_no_speculation = None
    note = None

    def __init__(self, script: Sequence[int], vocab_size: int, width: int = 8):
        self.script = list(script)
        self.vocab_size = vocab_size
        self.verify_tile_width = width
        self.max_context_length = len(self.script) + 1
        self.forward_count = 0
        self.prefill_forward_count = 0
        self._history: list[int] = []
        self.lease = Exclusive().lease
        self.call_count = 0

    @property
    def tokens(self) -> TokenView:
        return TokenView(self._history)

    @property
    def processed_token_count(self) -> int:
        return len(self._history)

    @property
    def one_forward_draft_budget(self) -> int:
        return max(
            0, min(self.verify_tile_width - 1, self.max_context_length - len(self._history) - 2)
        )

    @property
    def max_verify_block_length(self) -> int:
        return self.max_context_length - 1 - len(self._history)

    def prefill(self, tokens, progress=None) -> None:
        self.call_count += 1
        self._history += token_ids(tokens, self.vocab_size, "prefill")
        self.prefill_forward_count += 1

    def verify(self, block, capture=Capture(), noise_key=None) -> VerifyRows:  # noqa: B008
        self.call_count += 1
        argmax = []
        for token in token_ids(block, self.vocab_size, "verify"):
            self._history.append(token)
            count = len(self._history)
            known = self._history == self.script[:count] and count < len(self.script)
            argmax.append(self.script[count] if known else 0)
        self.forward_count += 1
        logits = (mx.arange(self.vocab_size)[None] == mx.array(argmax)[:, None]) * 10.0
        return VerifyRows(argmax, [0] * len(argmax), 1, logits if capture.logits else None)

    def allows_rewind(self, to: int) -> bool:
        return 0 <= to <= len(self._history)

    def longest_rewind(self, to: int) -> int:
        return min(to, len(self._history))

    def reset(self, to: int) -> None:
        assert self.allows_rewind(to)
        self.call_count += 1
        del self._history[to:]
