"""Drafters that know the answer, and spoil it in ways that an engine must not mind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxspec.drafting import Drafter, PromptLookup


@dataclass(frozen=True)
class Oracle:
    """Proposes the text itself, spoiled.

    Attributes:
        text: Prompt and plain decoding's answer.
        spoil: Takes (index in the draft, right token) and returns what to propose.
    """

    text: Sequence[int]
    spoil: Callable[[int, int], int]

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """What follows, spoiled; past the end of the text, its beginning."""
        begin = len(history)
        known = [*self.text[begin : begin + budget], *self.text][:budget]
        return [self.spoil(index, token) for index, token in enumerate(known)]

    def commit(self, length: int) -> None:
        """Nothing is remembered."""

    def reset(self) -> None:
        """Nothing is remembered."""


def drafters(text: Sequence[int], vocab_size: int) -> dict[str, Drafter]:
    """Every drafter by name, the kindest first.

    Args:
        text: Prompt and plain decoding's answer.
        vocab_size: Of the target.
    """
    rng = random.Random(0)

    def wrong(token: int) -> int:
        return (token + 1) % vocab_size

    return {
        "prompt lookup": PromptLookup(min_ngram=2),
        "an oracle": Oracle(text, lambda index, token: token),
        "an oracle that ends wrong": Oracle(text, lambda i, t: t if i < 2 else wrong(t)),
        "an oracle half wrong": Oracle(text, lambda i, t: t if rng.random() < 0.5 else wrong(t)),
        "a drafter always wrong": Oracle(text, lambda index, token: wrong(token)),
    }
