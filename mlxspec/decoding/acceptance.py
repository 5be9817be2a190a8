"""Which tokens a verified block yields: the draft's where the model agrees, then the model's own.

Every rule yields lazily, row after row, and looks at a row only when the token before it has been
taken: a caller's function runs once per emitted token and never sees a rejected draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlxspec.callers import require_callable
from mlxspec.decoding.sampling import Purpose, Sampling, row_keys, uniform
from mlxspec.engine.protocol import Capture, VerifyRows
from mlxspec.errors import NonFiniteLogits
from mlxspec.numbers import whole_number
from mlxspec.scan import LogitRowScan
from mlxspec.scan.mlx_form import soft_cap

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Choice(NamedTuple):
    """A token, and its row of log-probabilities [vocab] if the rule has it; lazy."""

    token: int
    logprobs: mx.array | None


class Acceptance(Protocol):
    """How tokens are chosen from verified rows."""

    @property
    def capture(self) -> Capture:
        """What the rows must bring."""

    @property
    def sampling(self) -> Sampling:
        """How a draft model chooses so as to agree as often as can be."""

    @property
    def compares_distributions(self) -> bool:
        """Whether `choices` wants the scores that a draft was drawn by."""

    @property
    def takes_tiles_choice(self) -> bool:
        """Whether a row's choice is what its tile chose, so that it is known on the device."""

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """Yield the token after the anchor, then one more for every draft token agreed with.

        Args:
            rows: What `verify` said of the anchor and the draft.
            draft: The proposal, [k].
            position: Where the first choice stands.
            draft_scores: float32 [k, vocab], whose softmax every draft token was drawn from;
                None where each is a point mass.
        """

    def begin(self, prompt: Sequence[int]) -> None:
        """A sequence begins with this prompt."""


@dataclass(frozen=True)
class ModelsChoice:
    """The draft stays where it is what the tile itself chose: greedy, or with coupled noise.

    Attributes:
        sampling: How the tile chooses.
        with_logprobs: Whether log-probabilities are wanted.
    """

    sampling: Sampling = field(default_factory=Sampling)
    with_logprobs: bool = False
    compares_distributions = False
    takes_tiles_choice = True

    @property
    def capture(self) -> Capture:
        """The tile's own choice, and the logits only where log-probabilities are wanted."""
        if self.sampling.greedy:
            return Capture(logits=self.with_logprobs, raw=self.with_logprobs)
        return Capture(logits=self.with_logprobs, scores=self.sampling)

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing to remember."""

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """See `Acceptance.choices`."""
        for row, token in enumerate(rows.argmax):
            yield Choice(token, log_probabilities(rows, row) if self.with_logprobs else None)
            if row == len(draft) or draft[row] != token:
                return


class CallersChoice:
    """Logits processors, and a sampler or our own choice, run on one row after the other.

    They are called as mlx-lm calls them: processors with (prompt and output so far [n], logits
    [1, vocab]), the sampler with log-probabilities [1, vocab].

    Args:
        processors: mlx-lm's logits processors, in order.
        sampler: mlx-lm's kind of sampler; None chooses by `sampling` and `noise_key`.
        sampling: How to choose without a sampler.
        noise_key: uint32 [2].

    Raises:
        ValueError: A processor or the sampler is no function.
    """

    capture = Capture(logits=True)
    compares_distributions = False
    takes_tiles_choice = False

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        sampler: Sampler | None,
        sampling: Sampling,
        noise_key: mx.array,
    ):
        self._processors = checked_processors(processors)
        if sampler is not None:
            require_callable("sampler", sampler, "log-probabilities [1, vocab]")
        self._sampler = sampler
        self._sampling = sampling
        self._noise_key = noise_key
        self._tokens = mx.array([], mx.int32)

    @property
    def sampling(self) -> Sampling:
        """Without a sampler ours; what a caller's sampler would draw, nobody can foresee."""
        return self._sampling if self._sampler is None else Sampling()

    def begin(self, prompt: Sequence[int]) -> None:
        """Remember the prompt: processors see it before the output."""
        self._tokens = mx.array(list(prompt), mx.int32)

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """See `Acceptance.choices`."""
        assert rows.logits is not None
        for row in range(len(draft) + 1):
            logits = rows.logits[row : row + 1]
            for processor in self._processors:
                logits = processor(self._tokens, logits)
            logprobs = normalised(logits)
            token = self._choose(logits, logprobs, position + row)
            if token == 0 and mx.isnan(logits).all().item():
                raise NonFiniteLogits(
                    f"the logits processors left no number in the row of position {position + row}"
                )
            if self._processors:
                self._tokens = mx.concatenate([self._tokens, mx.array([token], mx.int32)])
                # Left to compute, it would belong to this thread, and grow with every token.
                mx.eval(self._tokens)
            yield Choice(token, logprobs[0])
            if row == len(draft) or draft[row] != token:
                return

    def _choose(self, logits: mx.array, logprobs: mx.array, position: int) -> int:
        if self._sampler is not None:
            return whole_number(
                "the sampler's token", self._sampler(logprobs), 0, logits.shape[-1] - 1
            )
        if self._sampling.greedy:
            scores = logits
        else:
            scores = self._sampling(logits, mx.array([position]), self._noise_key)
        choice: int = LogitRowScan()(scores).argmax.item()  # type: ignore[assignment]
        return choice


class RejectionSampling:
    """The classic test: a draft token x stays with probability min(1, p(x) / q(x)).

    Where it does not, the token is drawn from the residual max(0, p - q), normalised (Leviathan,
    Kalman, Matias, 2023; Chen et al., 2023). The text has the model's distribution and is not the
    text of plain decoding. A draft without scores is a point mass: q(x) = 1. A draft model's q
    has gone through the same filters and temperature as p.

    Args:
        sampling: Gives p, filters and temperature applied.
        noise_key: uint32 [2].
        with_logprobs: Whether log-probabilities are wanted.
    """

    capture = Capture(logits=True)
    compares_distributions = True
    takes_tiles_choice = False

    def __init__(self, sampling: Sampling, noise_key: mx.array, with_logprobs: bool = False):
        self.sampling = sampling
        self._noise_key = noise_key
        self._with_logprobs = with_logprobs

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing to remember."""

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """See `Acceptance.choices`."""
        kept, tokens = self._decide(rows, draft, position, draft_scores)
        for row in range(len(draft) + 1):
            stays = row < len(draft) and kept[row]
            token = draft[row] if stays else tokens[row]
            yield Choice(token, log_probabilities(rows, row) if self._with_logprobs else None)
            if not stays:
                return

    def _decide(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None,
    ) -> tuple[list[bool], list[int]]:
        """For every row: whether its draft token stays, and the token drawn if it does not.

        All rows at once: which of them count is settled by the first that does not stay.
        """
        assert rows.logits is not None
        count = len(draft) + 1
        positions = mx.arange(position, position + count, dtype=mx.int32)
        scaled = self.sampling.tempered(rows.logits[:count], positions, self._noise_key)
        # The row after the last draft token has no draft to test; -1 marks it.
        drafted = mx.array([*draft, -1], mx.int32)
        at = mx.maximum(drafted, 0)[:, None]
        draws = uniform(self._noise_key, positions, Purpose.ACCEPT)
        probabilities = mx.softmax(scaled, axis=-1)
        p = mx.take_along_axis(probabilities, at, axis=-1)[:, 0]
        if draft_scores is None or not draft:
            keep = draws < p
            has_draft = (drafted >= 0)[:, None]
            drawn = has_draft & (mx.arange(scaled.shape[-1])[None] == at)
            residual = mx.where(drawn, -mx.inf, scaled)
        else:
            guessed = mx.softmax(draft_scores[: len(draft)], axis=-1)
            guessed = mx.pad(guessed, [(0, 1), (0, 0)])
            q = mx.take_along_axis(guessed, at, axis=-1)[:, 0]
            keep = draws * q < p
            rest = mx.log(mx.maximum(probabilities - guessed, 0))
            # Nothing is left where the two agree but for rounding; what p says is then right.
            residual = mx.where(mx.isinf(rest).all(axis=-1, keepdims=True), scaled, rest)
        keys = mx.concatenate(
            [
                row_keys(self._noise_key, positions[:-1], Purpose.RESIDUAL),
                row_keys(self._noise_key, positions[-1:], Purpose.TOKEN),
            ]
        )
        noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(keys)
        tokens = LogitRowScan()(residual + noise).argmax
        mx.eval(keep, tokens)
        head: tuple[list[bool], list[int]] = (
            keep.tolist(),
            tokens.tolist(),
        )  # type: ignore[assignment]
        return head


def checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    """Logits processors as a tuple; None has none.

    Raises:
        ValueError: It is one function instead of several, or holds what is no function.
    """
    if processors is None:
        return ()
    if callable(processors) or not isinstance(processors, Iterable):
        raise ValueError(
            f"logits_processors: expected a list of functions, got {processors!r}; a single one is "
            "a list too"
        )
    checked = tuple(processors)
    for index, processor in enumerate(checked):
        name = f"logits_processors[{index}]"
        require_callable(name, processor, "(tokens [n], logits [1, vocab])")
    return checked


def log_probabilities(rows: VerifyRows, row: int) -> mx.array:
    """A row of log-probabilities as mlx-lm gives it, [vocab] in the logits' dtype; lazy."""
    assert rows.logits is not None
    logits = rows.logits[row]
    return normalised(logits if rows.cap is None else soft_cap(logits, rows.cap))


def normalised(logits: mx.array) -> mx.array:
    """Logits of one row as log-probabilities, in their dtype and shape; NaN counts as -inf."""
    cleaned = mx.where(mx.isnan(logits), mx.array(-mx.inf, logits.dtype), logits)
    return cleaned - mx.logsumexp(cleaned, keepdims=True)
