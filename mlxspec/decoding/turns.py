"""What the next turn can use of an engine: the part of its history that the new prompt repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlxspec.engine.protocol import SpeculativeEngine


class Prefix(NamedTuple):
    """What an engine holds of a prompt.

    Attributes:
        shared: Tokens at the prompt's beginning that the engine's history has too.
        reusable: How many of them need no forward. The prompt's last token always needs one: it
            is the anchor, whose row says what follows.
        lost: How many need one only because the state does not hold them any more.
    """

    shared: int
    reusable: int
    lost: int


def held_prefix(engine: SpeculativeEngine, prompt: Sequence[int]) -> Prefix:
    """What an engine holds of a prompt of one token or more; nothing is changed."""
    shared = common_length(engine.tokens, prompt)
    wanted = min(shared, len(prompt) - 1)
    reusable = engine.longest_rewind(wanted)
    return Prefix(shared, reusable, wanted - reusable)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    length = min(len(one), len(other))
    first, second = list(one[:length]), list(other[:length])
    if first == second:
        return length
    return next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
