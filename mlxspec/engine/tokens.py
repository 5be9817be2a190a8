"""A read-only view of a sequence of token ids that somebody else owns and extends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import mlx.core as mx
import numpy as np


class TokenView(Sequence[int]):
    """The owner's list, and optionally one token after it, seen without a copy.

    An engine holds the one list of token ids and a drafter reads it every round: a copy would
    make a round cost the length of the context, and the list itself could be changed by mistake.

    Args:
        tokens: The owner's list, or a view of it; this view follows its growth.
        last: A token that follows the list (the anchor, which no forward has processed yet).
    """

    __slots__ = ("_last", "_tokens")

    def __init__(self, tokens: Sequence[int], last: int | None = None):
        self._tokens = tokens
        self._last = last

    def __len__(self) -> int:
        return len(self._tokens) + (self._last is not None)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and stop <= len(self._tokens):
                return list(self._tokens[start:stop])
            return [self[i] for i in range(start, stop, step)]
        if index < 0:
            index += len(self)
        if self._last is not None and index == len(self._tokens):
            return self._last
        if not 0 <= index < len(self._tokens):
            raise IndexError("token index out of range")
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        yield from self._tokens
        if self._last is not None:
            yield self._last

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenView({list(self)!r})"


def token_ids(
    tokens: Sequence[int] | mx.array | np.ndarray, vocab_size: int, what: str
) -> list[int]:
    """Token ids as Python integers, each checked against the vocabulary.

    Args:
        tokens: A flat sequence of integers, an `mx.array` or a NumPy array of shape [n].
        vocab_size: Ids from 0 up to, not including, this are valid.
        what: How the message names the tokens, for example "prompt".

    Raises:
        TypeError: Something in it is not an integer, or it is not one flat sequence.
        ValueError: An id lies outside the vocabulary.
    """
    if isinstance(tokens, str | bytes):
        raise TypeError(f"{what}: expected token ids, got text; encode it with the tokenizer first")
    if isinstance(tokens, mx.array | np.ndarray) and tokens.ndim != 1:
        raise TypeError(
            f"{what}: expected one flat sequence of token ids, got an array of shape "
            f"{tuple(tokens.shape)}"
        )
    values: Any = tokens.tolist() if isinstance(tokens, mx.array | np.ndarray) else tokens
    ids: list[int] = []
    for index, token in enumerate(values):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"{what}: expected integers, got {token!r} at index {index}")
        token = token.__index__()
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{what}: token id {token} at index {index} is outside the model's vocabulary "
                f"of {vocab_size} ids (0 to {vocab_size - 1})"
            )
        ids.append(token)
    return ids
