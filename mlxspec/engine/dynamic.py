"""The dynamic-shape engine: mlx-lm's own forward and caches, for models that cannot be static."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ChunkedKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlxspec.engine.exclusive import one_call
from mlxspec.engine.protocol import Capture, ProgressCallback, VerifyRows
from mlxspec.engine.sequence import OneSequence
from mlxspec.engine.support import default_context_length, why_not_static
from mlxspec.engine.tokens import token_ids
from mlxspec.errors import RewindRefused
from mlxspec.numbers import whole_number
from mlxspec.scan import LogitRowScan


class DynamicShapeEngine(OneSequence):
    """Implements `SpeculativeEngine` one token at a time, as mlx-lm generates without drafts.

    It takes no drafts and says why: mlx-lm's caches cannot all be rewound exactly, and some
    silently keep what they were told to forget.

    Args:
        model: Any model of mlx-lm.
        max_context_length: Most tokens of a sequence. Default: what the model's config declares.
        prefill_step_size: Prompt tokens per prefill forward, as in mlx-lm.
    """

    verify_tile_width = 1
    one_forward_draft_budget = 0
    trace_count = 0
    compiled: bool | None = False

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context_length: int | None = None,
        prefill_step_size: int = 2048,
    ):
        if max_context_length is None:
            context_length = default_context_length(model, 1)
        else:
            context_length = whole_number("max_context_length", max_context_length, 2)
        prefill_step_size = whole_number("prefill_step_size", prefill_step_size, 1)
        super().__init__(model, _row_width(model), context_length)
        self._prefill_step_size = prefill_step_size
        self._caches = make_prompt_cache(model)
        # Whether something is at work on the caches, or has left them half done.
        self._unsure = False
        reason = why_not_static(model) or "it was asked for"
        self.why_no_speculation = f"the dynamic engine decodes plainly: {reason}"

    @property
    def processed_token_count(self) -> int:
        """The cursor: how many tokens the caches cover."""
        return 0 if self._unsure else len(self._history)

    @property
    def max_verify_block_length(self) -> int:
        """One token, the anchor, or none where the context is full."""
        return min(1, self._context_length - 1 - len(self._history))

    @property
    def weights_unchanged(self) -> bool:
        """True: every forward reads the model's present weights."""
        return True

    @one_call
    def prefill(self, tokens: Sequence[int], progress: ProgressCallback | None = None) -> None:
        """Process prompt tokens in steps of `prefill_step_size`; see the protocol.

        Raises:
            ValueError: An id outside the vocabulary, or more tokens than the context has room
                for. The engine is as it was.
            EngineBusy: Another thread is inside the engine.

        A forward that fails on its way leaves the engine empty. Where `progress` raises, the
        engine goes back to what it held if its caches can, and is empty if they cannot.
        """
        self._mend()
        ids = token_ids(tokens, self._vocab_size, "prefill")
        room = self._context_length - 1 - len(self._history)
        if len(ids) > room:
            raise ValueError(
                f"prefill: expected at most {room} tokens, got {len(ids)}: the context holds "
                f"{self._context_length} tokens, the last of which is only emitted. Shorten "
                "the input or raise max_context_length"
            )
        before = len(self._history)
        report = progress or (lambda processed, total: None)
        report(0, len(ids))
        for begin in range(0, len(ids), self._prefill_step_size):
            step = ids[begin : begin + self._prefill_step_size]
            try:
                self._unsure = True
                self.model(mx.array([step]), cache=self._caches)
                mx.eval([cache.state for cache in self._caches])
                self._history += step
                self._unsure = False
            except BaseException:
                self._mend()
                raise
            self._prefill_forward_count += 1
            try:
                report(begin + len(step), len(ids))
            except BaseException:
                self._shorten(before if self.allows_rewind(before) else 0)
                raise
        mx.clear_cache()

    @one_call
    def verify(
        self,
        block: Sequence[int],
        capture: Capture = Capture(),  # noqa: B008
        noise_key: mx.array | None = None,
    ) -> VerifyRows:
        """Process the anchor and say what follows it; see the protocol.

        Raises:
            ValueError: The block is not exactly one token of the vocabulary, or the context is
                full. The engine is as it was.
            EngineBusy: Another thread is inside the engine.

        A forward that fails on its way leaves the engine empty.
        """
        self._mend()
        ids = token_ids(block, self._vocab_size, "verify")
        if len(ids) != 1:
            raise ValueError(
                f"verify: the dynamic engine takes the anchor alone, got {len(ids)} tokens"
            )
        if not self.max_verify_block_length:
            raise ValueError(
                f"verify: the context of {self._context_length} tokens is full; shorten the "
                "input or raise max_context_length"
            )
        try:
            self._unsure = True
            rows = self._rows_after(ids, capture, noise_key)
            self._history += ids
            self._unsure = False
        except BaseException:
            self._mend()
            raise
        self._forward_count += 1
        return rows

    def _mend(self) -> None:
        """Empty the engine if nobody can tell how far a call that did not end moved the caches."""
        if self._unsure:
            self._history.clear()
            self._caches = make_prompt_cache(self.model)
            self._unsure = False

    def _rows_after(
        self, ids: list[int], capture: Capture, noise_key: mx.array | None
    ) -> VerifyRows:
        logits = self.model(mx.array([ids]), cache=self._caches)[:, -1]
        rows = LogitRowScan(top_k=capture.top_k)(logits)
        choice = rows.argmax
        if capture.scores is not None:
            if noise_key is None:
                noise_key = mx.array([0, 0], mx.uint32)
            position = mx.array([len(self._history) + 1])
            choice = LogitRowScan()(capture.scores(logits, position, noise_key)).argmax
        head: Any = mx.stack([choice, rows.nan_count]).tolist()
        argmax, nan_count = head
        return VerifyRows(
            argmax,
            nan_count,
            1,
            logits if capture.logits else None,
            rows.top_values,
            rows.top_indices,
        )

    def allows_rewind(self, to: int) -> bool:
        """Whether `reset(to)` would succeed: always to 0, else where mlx-lm can trim its caches."""
        if not 0 <= to <= self.processed_token_count:
            return False
        if to in (0, self.processed_token_count):
            return True
        # A chunked cache drops its oldest keys, and says all the same that it can be trimmed.
        chunked = any(isinstance(cache, ChunkedKVCache) for cache in self._caches)
        return not chunked and can_trim_prompt_cache(self._caches)

    def longest_rewind(self, to: int) -> int:
        """The farthest length, `to` or less, that a next turn may go on from."""
        to = max(0, min(to, self.processed_token_count))
        return to if self.allows_rewind(to) else 0

    @one_call
    def reset(self, to: int) -> None:
        """Shorten history and cursor to `to` tokens.

        Raises:
            ValueError: `to` lies outside 0..processed_token_count.
            RewindRefused: The caches cannot forget. The engine is as it was.
            EngineBusy: Another thread is inside the engine.
        """
        self._mend()
        processed = len(self._history)
        if not 0 <= to <= processed:
            raise ValueError(
                f"reset: expected a length from 0 to {processed}, the tokens processed so far, "
                f"got {to}"
            )
        if not self.allows_rewind(to):
            raise RewindRefused(
                f"reset: these caches cannot go back from {processed} tokens to {to}; reset(0) "
                "and process the prompt again"
            )
        self._shorten(to)

    def _shorten(self, to: int) -> None:
        """Forget all but `to` tokens, which the caches allow."""
        processed = len(self._history)
        try:
            self._unsure = True
            if to == 0:
                self._caches = make_prompt_cache(self.model)
            elif to < processed:
                trim_prompt_cache(self._caches, processed - to)
            del self._history[to:]
            self._unsure = False
        except BaseException:
            self._mend()
            raise


def _row_width(model: nn.Module) -> int:
    """Entries in a row of logits, from a forward that is traced and never computed."""
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
