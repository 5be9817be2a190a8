"""Rows of logits: plain decoding's, those of tiles and of drafted text, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxspec.benchmark.contenders import prefilled
from mlxspec.decoding import Choice, ModelsChoice, SpeculativeDecoder, SpeculativeDecodingOptions
from mlxspec.decoding.sampling import Sampling
from mlxspec.drafting import Drafter
from mlxspec.engine import Capture, StaticShapeEngine, VerifyRows
from mlxspec.scan.mlx_form import soft_cap
from mlxspec.verification.places import Place
from mlxspec.verification.verdict import Difference

_SEED = 1
# What the engine brings back in a greedy generation with log-probabilities.
_CAPTURE = Capture(logits=True, raw=True)
# How many times mlx-lm's own rounding a difference from it may be.
_ROOM = 4


@dataclass(frozen=True)
class Answer:
    """Tokens generated at a place, and the rows they were chosen from.

    Attributes:
        tokens: Token ids.
        rows: Logits [vocab] of each.
        cap: The model's final soft cap, if it has one that the rows have not gone through.
    """

    tokens: list[int]
    rows: list[mx.array]
    cap: float | None = None


class _KeepsLogits:
    """The model's own choice, with rows of logits in the place of log-probabilities.

    Attributes:
        capture: What a generation with log-probabilities brings back.
        sampling: How tokens are chosen.
        cap: The final soft cap that the rows have not gone through; None if there is none.
    """

    compares_distributions = False
    takes_tiles_choice = True

    def __init__(self, sampling: Sampling):
        self._rule = ModelsChoice(sampling, with_logprobs=True)
        self.capture = self._rule.capture
        self.sampling = sampling
        self.cap: float | None = None

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
        assert rows.logits is not None
        self.cap = rows.cap
        for row, choice in enumerate(self._rule.choices(rows, draft, position)):
            yield Choice(choice.token, rows.logits[row])


def generate(
    engine: StaticShapeEngine,
    text: Sequence[int],
    place: Place,
    drafter: Drafter | None = None,
    *,
    num_draft_tokens: int | None = 0,
    align_proposals: bool = True,
    sampling: Sampling | None = None,
) -> Answer:
    """Let the engine generate at a place, as `mlxspec generate` does.

    Args:
        engine: The engine.
        text: A sequence that reaches the place.
        place: Where, and how much.
        drafter: Drafts; None decodes plainly, from an empty engine.
        num_draft_tokens: Most tokens to draft a round; None is as many as pay.
        align_proposals: Whether a draft is shortened to one forward.
        sampling: How tokens are chosen; None is greedy.
    """
    if drafter is None:
        # What all is compared with owes nothing to what the engine held before.
        engine.reset(0)
    rule = _KeepsLogits(sampling or Sampling())
    decoder = SpeculativeDecoder(
        engine,
        drafter,
        SpeculativeDecodingOptions(num_draft_tokens, align_proposals),
        acceptance=rule,
        seed=_SEED,
    )
    tokens: list[int] = []
    rows: list[mx.array] = []
    emissions = decoder.generate(text[: place.start + 1], max_tokens=place.length)
    with closing(emissions):
        for emission in emissions:
            assert emission.logprobs is not None
            mx.eval(emission.logprobs)
            tokens.append(emission.token)
            rows.append(emission.logprobs)
    return Answer(tokens, rows, rule.cap)


def score(
    engine: StaticShapeEngine,
    text: Sequence[int],
    place: Place,
    plain: Answer,
    width: int,
    shifted: bool,
) -> Difference | None:
    """Score plain decoding's text in tiles of one width; what differs first, or None.

    Blocks are as long as the width wherever the engine takes that; what goes past the answer is
    filled up, as a draft might be. Whatever the engine held is rewound where it can be, so that
    what an earlier look wrote past the place is there to do harm.

    Args:
        engine: The engine.
        text: A sequence that reaches the place.
        place: Where.
        plain: Plain decoding's answer there.
        width: Of the ladder.
        shifted: Begin with a block that leaves rows of the tile empty.
    """
    sequence = [*text[: place.start + 1], *plain.tokens]
    padding = sequence[: 2 * width]
    return_to(engine, sequence, place.start)
    narrower = max((w for w in engine.tile_widths if w < width), default=0)
    wanted = max(width // 2 + 1, narrower + 1) if shifted else width
    done = 0
    while done < len(plain.tokens):
        position = place.start + done
        length = min(wanted, engine.one_forward_draft_budget + 1)
        wanted = width
        block = [*sequence, *padding][position : position + length]
        rows = engine.verify(block, _CAPTURE).logits
        assert rows is not None
        found = _first_difference(plain, done, list(rows[: len(plain.tokens) - done]))
        if found is not None:
            row = found - done
            tile = next(w for w in engine.tile_widths if w >= len(block))
            return _difference(plain, found, rows[row], place, tile, row)
        done += len(block)
    return None


def compare(plain: Answer, other: Answer, place: Place) -> Difference | None:
    """The first row of another answer that is not plain decoding's bit for bit, or None.

    Raises:
        ValueError: The rows are equal, and the tokens are not.
    """
    found = _first_difference(plain, 0, other.rows)
    if found is not None:
        return _difference(plain, found, other.rows[found], place, None, None, other.tokens[found])
    if plain.tokens[: len(other.tokens)] != other.tokens[: len(plain.tokens)]:
        raise ValueError("equal rows, and other tokens chosen from them")
    if len(plain.tokens) != len(other.tokens):
        raise ValueError(f"{len(other.tokens)} tokens instead of {len(plain.tokens)}")
    return None


@dataclass(frozen=True)
class MlxLmRows:
    """mlx-lm's forward over plain decoding's text.

    Attributes:
        answer: What it chooses after each token, one token at a time, and the rows.
        room: How far a row may be from these and still be the same but for rounding: a few times
            what mlx-lm's own rows change by when it is given all tokens at once.
    """

    answer: Answer
    room: float


def mlx_lm_rows(model: nn.Module, text: Sequence[int], place: Place, plain: Answer) -> MlxLmRows:
    """Let mlx-lm score plain decoding's text at a place."""
    before = list(text[: place.start + 1])
    tokens = [before[-1], *plain.tokens[:-1]]
    cache = prefilled(model, before)
    rows = []
    for token in tokens:
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(rows[-1])
    at_once = model(mx.array([tokens]), cache=prefilled(model, before))[0]
    stacked = mx.stack(rows)
    noise = _largest(stacked - at_once)
    size = _largest(stacked)
    room = _ROOM * max(noise, mx.finfo(stacked.dtype).eps * size)
    choices: Any = mx.argmax(stacked, axis=-1).tolist()
    return MlxLmRows(Answer(choices, rows), room)


def capped(plain: Answer) -> Answer:
    """An answer whose rows have gone through the model's soft cap, as mlx-lm's have."""
    if plain.cap is None:
        return plain
    return Answer(plain.tokens, [soft_cap(row, plain.cap) for row in plain.rows])


def distance(plain: Answer, other: Answer) -> float:
    """The largest difference between two answers' rows."""
    return _largest(mx.stack(plain.rows) - mx.stack(other.rows))


def first_beyond(plain: Answer, theirs: MlxLmRows, place: Place) -> Difference | None:
    """Where another token is chosen than mlx-lm's forward would, or a row is not near its own."""
    other = theirs.answer
    for token, (ours, row) in enumerate(zip(plain.rows, other.rows, strict=True)):
        if plain.tokens[token] != other.tokens[token] or _largest(ours - row) > theirs.room:
            return _difference(plain, token, row, place, None, None, other.tokens[token])
    return None


def _largest(array: mx.array) -> float:
    """The largest size of any number in an array; what is no number does not count."""
    sizes = mx.abs(array.astype(mx.float32))
    largest: Any = mx.max(mx.where(mx.isfinite(sizes), sizes, 0)).item()
    return largest


def return_to(engine: StaticShapeEngine, sequence: Sequence[int], position: int) -> None:
    """Bring the engine to a position of a sequence, by rewinding it if it allows that."""
    known = list(engine.tokens[:position]) == list(sequence[:position])
    if known and position <= engine.processed_token_count and engine.allows_rewind(position):
        engine.reset(position)
        return
    engine.reset(0)
    engine.prefill(list(sequence[:position]))


def _first_difference(plain: Answer, begin: int, rows: Sequence[mx.array]) -> int | None:
    """Index of the first of plain decoding's rows from `begin` on that these are not."""
    expected = plain.rows[begin : begin + len(rows)]
    pairs = list(zip(rows, expected, strict=False))
    same: Any = mx.stack([mx.array_equal(a, b, equal_nan=True) for a, b in pairs]).tolist()
    return next((begin + i for i, equal in enumerate(same) if not equal), None)


def _difference(
    plain: Answer,
    token: int,
    row: mx.array,
    place: Place,
    width: int | None,
    index: int | None,
    chosen: int | None = None,
) -> Difference:
    expected_row = plain.rows[token]
    ours, theirs = (_floats(array) for array in (expected_row, row))
    unlike = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    gaps = np.where(unlike, np.nan_to_num(np.abs(ours - theirs), nan=np.inf), 0)
    at = int(np.argmax(gaps))
    expected = plain.tokens[token]
    if chosen is None:
        chosen = int(np.argmax(np.nan_to_num(theirs, nan=-np.inf)))
    rest = np.where(np.arange(ours.size) == expected, -np.inf, np.nan_to_num(ours, nan=-np.inf))
    other = chosen if chosen != expected else int(np.argmax(rest))
    return Difference(
        token=token,
        position=place.start + 1 + token,
        width=width,
        row=index,
        expected=expected,
        chosen=chosen,
        margin=float(ours[expected] - ours[other]),
        logits=int(unlike.sum()),
        at_logit=at,
        largest=float(gaps[at]),
        ulps=abs(_ordinal(expected_row, at) - _ordinal(row, at)),
    )


def _floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def _ordinal(row: mx.array, index: int) -> int:
    """A number's place among all numbers of its type, so that neighbours differ by one."""
    bits = {4: mx.int32, 2: mx.int16}[row.dtype.size]
    value: int = row[index : index + 1].view(bits).item()  # type: ignore[assignment]
    lowest = -(1 << (8 * row.dtype.size - 1))
    return value if value >= 0 else lowest - value
