"""What a decoder may ask of an engine, whichever way the engine runs the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx

ProgressCallback = Callable[[int, int], None]


class RowScores(Protocol):
    """Scores every token of every row; where one is given, the largest score is the choice.

    It is traced into the tile and part of its identity, so it is hashable and depends on its
    arguments and on nothing else.
    """

    def __call__(self, logits: mx.array, positions: mx.array, noise_key: mx.array) -> mx.array:
        """Score rows.

        Args:
            logits: [rows, vocab] in the model's dtype.
            positions: int32 [rows], the position that each row's choice will have.
            noise_key: uint32 [2].

        Returns:
            float32 [rows, vocab].
        """

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Capture:
    """What `verify` brings back of every row; part of a tile's identity.

    Attributes:
        logits: Bring the logits themselves.
        top_k: Bring this many of the largest logits of every row and their ids; 0 brings none.
        scores: What to take the argmax of; None is the logits.
        raw: Bring the logits as they are before the model's final soft cap, which `VerifyRows.cap`
            then names: the scan caps as it reads, and nobody else may need them capped.
    """

    logits: bool = False
    top_k: int = 0
    scores: RowScores | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k: expected 0 or more, got {self.top_k}")


@dataclass(frozen=True)
class VerifyRows:
    """What the model says after each token of a verified block: row i follows block[i].

    Attributes:
        argmax: The model's own next token after each row, [len(block)]: the first maximum of its
            logits, or of its scores where the capture has them.
        nan_count: How many logits of each row were NaN, [len(block)].
        forwards: How many forwards the block took; 1 for an aligned block.
        logits: [len(block), vocab] in the model's dtype, if captured.
        cap: The final soft cap that `logits` have not gone through yet; None if there is none.
        top_values: [len(block), k] float, largest first, if captured.
        top_indices: [len(block), k] uint32, the ids of `top_values`, if captured.
        drafted: The ids of the drafts that came unread, in their order; they count as part of the
            block.
        ahead: Whether the step after the block is under way: see `SpeculativeEngine.verify`.
    """

    argmax: list[int]
    nan_count: list[int]
    forwards: int
    logits: mx.array | None = None
    top_values: mx.array | None = None
    top_indices: mx.array | None = None
    cap: float | None = None
    drafted: Sequence[int] = ()
    ahead: bool = False


@runtime_checkable
class SpeculativeEngine(Protocol):
    """A model with a state that covers the first `processed_token_count` tokens of one sequence.

    Between calls the state covers every token of `tokens`; the token that follows them (the
    anchor) is the first of the next block. A call that raises leaves the engine as it was.
    """

    @property
    def vocab_size(self) -> int:
        """Entries in a row of logits; every token id lies below it."""

    @property
    def max_context_length(self) -> int:
        """Most tokens a sequence may have, prompt and output; the last is never processed."""

    @property
    def tokens(self) -> Sequence[int]:
        """The history: every token the state covers, as a read-only view."""

    @property
    def processed_token_count(self) -> int:
        """The cursor: how many tokens the state covers, and the position of the anchor."""

    @property
    def verify_tile_width(self) -> int:
        """Rows of the widest decode tile."""

    @property
    def one_forward_draft_budget(self) -> int:
        """How many drafts after an anchor at the cursor fit one forward; never below 0."""

    @property
    def max_verify_block_length(self) -> int:
        """The longest block `verify` takes from the present cursor, in however many forwards."""

    @property
    def call_count(self) -> int:
        """Calls of `prefill`, `verify` and `reset` so far: who made the last one can tell."""

    @property
    def forward_count(self) -> int:
        """Decode forwards since the engine was made."""

    @property
    def prefill_forward_count(self) -> int:
        """Prefill forwards since the engine was made."""

    @property
    def trace_count(self) -> int:
        """How often a graph was traced since the engine was made; 0 where nothing is traced."""

    @property
    def compiled(self) -> bool | None:
        """Whether MLX compiles the graphs; None until a second call of one tile could tell."""

    @property
    def why_no_speculation(self) -> str | None:
        """Why this engine takes no drafts, or None if it does."""

    @property
    def note(self) -> str | None:
        """What a user should know of how this engine runs the model, or None."""

    def prefill(self, tokens: Sequence[int], progress: ProgressCallback | None = None) -> None:
        """Extend the history by `tokens` and process them; no logits are computed."""

    def verify(
        self,
        block: Sequence[int],
        capture: Capture = ...,
        noise_key: mx.array | None = None,
    ) -> VerifyRows:
        """Extend the history by `block` (anchor, then drafts), process it, and say what follows.

        `noise_key`, uint32 [2], is handed to `capture.scores`. An engine may take a fourth
        argument, `drafted`: drafts after the block as an array, int32 [k], that the host has not
        read; it then has a true `takes_device_drafts`, and `VerifyRows.drafted` tells the ids.
        And a fifth, `ahead`: to submit the step after a block of one token before the token that
        it chose has been read; it then has a true `steps_ahead`, and `VerifyRows.ahead` tells
        whether it did.
        """

    def allows_rewind(self, to: int) -> bool:
        """Whether `reset(to)` would succeed."""

    def longest_rewind(self, to: int) -> int:
        """The farthest length, `to` or less, that a next turn may go on from.

        `reset` takes it, and it is the same whatever was drafted since the prompt, so that a
        turn after drafts computes what a turn without them computes. 0 is a new beginning.
        """

    def reset(self, to: int) -> None:
        """Shorten history and cursor to `to` tokens."""

    def lease(self) -> AbstractContextManager[None]:
        """Hold the engine for one sequence; a second holder gets `EngineBusy`."""
