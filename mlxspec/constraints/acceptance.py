"""Choosing among what a constraint allows: every row is masked by the state before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlxspec.constraints.lookahead import Lookahead
from mlxspec.decoding.acceptance import (
    CallersChoice,
    Choice,
    LogitsProcessor,
    Sampler,
    normalised,
)
from mlxspec.decoding.sampling import Sampling
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.engine.protocol import Capture, VerifyRows
from mlxspec.errors import GrammarError, NonFiniteLogits
from mlxspec.scan import LogitRowScan


class ConstrainedChoice:
    """Implements `Acceptance`: greedy or with coupled noise, among the allowed tokens alone.

    The mask comes after the caller's processors, so that none of them revives a forbidden token,
    and before the filters of the sampling, which count allowed tokens only. Log-probabilities are
    those after the mask. Without a function of the caller's, all rows are masked and chosen from
    at once; with one, row after row.

    Args:
        lookahead: Where the text stands; it is told of every token that is emitted.
        sampling: How to choose without a sampler.
        noise_key: uint32 [2].
        stats: Where forced tokens are counted.
        processors: mlx-lm's logits processors, in order.
        sampler: mlx-lm's kind of sampler; None chooses by `sampling` and `noise_key`.
    """

    capture = Capture(logits=True)
    compares_distributions = False
    takes_tiles_choice = False

    def __init__(
        self,
        lookahead: Lookahead,
        sampling: Sampling,
        noise_key: mx.array,
        stats: SpeculationStats,
        processors: Sequence[LogitsProcessor] = (),
        sampler: Sampler | None = None,
    ):
        self._lookahead = lookahead
        self._sampling = sampling
        self.sampling = sampling if sampler is None else Sampling()
        self._noise_key = noise_key
        self._stats = stats
        self._callers: CallersChoice | None = None
        if processors or sampler is not None:
            self._callers = CallersChoice([*processors, self._masked], sampler, sampling, noise_key)

    def begin(self, prompt: Sequence[int]) -> None:
        """Match anew: the prompt is no part of the text."""
        self._lookahead.begin()
        if self._callers is not None:
            self._callers.begin(prompt)

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """See `Acceptance.choices`.

        Raises:
            GrammarError: No token of the vocabulary may come next, or the caller's sampler chose
                one that may not.
            NonFiniteLogits: Of the tokens that may come next none has a number.
        """
        if self._callers is not None:
            chosen = self._callers.choices(rows, draft, position)
        else:
            chosen = self._chosen(rows, draft, position)
        for row, choice in enumerate(chosen):
            self._emit(choice, position + row)
            yield choice

    def _chosen(self, rows: VerifyRows, draft: Sequence[int], position: int) -> Iterator[Choice]:
        assert rows.logits is not None
        count = len(draft) + 1
        allowed = mx.array(self._lookahead.rows_along(draft))
        logits = _only(allowed, rows.logits[:count])
        if self._sampling.greedy:
            scores = logits
        else:
            positions = mx.arange(position, position + count, dtype=mx.int32)
            scores = self._sampling(logits, positions, self._noise_key)
        tokens: list[int] = LogitRowScan()(scores).argmax.tolist()  # type: ignore[assignment]
        for row, token in enumerate(tokens):
            yield Choice(token, normalised(logits[row]))
            if row == len(draft) or draft[row] != token:
                return

    def _masked(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The mask as the last of the caller's processors, of the row that is next."""
        return _only(mx.array(self._lookahead.allowed()), logits)

    def _emit(self, choice: Choice, position: int) -> None:
        allowed = self._lookahead.allowed()
        count = np.count_nonzero(allowed)
        if not count:
            raise GrammarError(
                f"at position {position} no token of the vocabulary continues the text as the "
                "grammar asks; change the grammar, or take a model whose tokenizer has the bytes"
            )
        if not allowed[choice.token]:
            if self._sampler_chose(choice):
                raise GrammarError(
                    f"the sampler chose token {choice.token} at position {position}, which the "
                    "grammar forbids and whose log-probability was -inf"
                )
            raise NonFiniteLogits(
                f"none of the {count} tokens that the grammar allows at position {position} has "
                "a number as its logit: the model gave none, or a logits processor took it"
            )
        self._stats.forced += count == 1
        self._lookahead.emit(choice.token)

    def _sampler_chose(self, choice: Choice) -> bool:
        """Whether there was something else to choose."""
        assert choice.logprobs is not None
        return bool((choice.logprobs > -mx.inf).any().item())


def _only(allowed: mx.array, logits: mx.array) -> mx.array:
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))
