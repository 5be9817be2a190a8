"""Drafters that do what drafters should not, and the plans that drive them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

KINDS = ("right", "wrong", "right then wrong", "wrong then right", "edge ids", "empty", "too long")


class PlannedDrafter:
    """Proposes by a plan of (kind, length), over and over, knowing what plain decoding says.

    Args:
        oracle: Prompt and plain decoding's whole output.
        plan: What to propose, round by round.
        vocab_size: For the ids at the vocabulary's edges.
    """

    def __init__(self, oracle: Sequence[int], plan: Sequence[tuple[str, int]], vocab_size: int):
        self.oracle = list(oracle)
        self.plan = list(plan) or [("empty", 0)]
        self.vocab_size = vocab_size
        self.round = 0
        self.histories: list[list[int]] = []

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """The plan's next proposal; right and wrong are meant literally."""
        kind, length = self.plan[self.round % len(self.plan)]
        self.round += 1
        self.histories.append(list(history))
        right = self.oracle[len(history) : len(history) + max(length, budget + 3)]
        right += [0] * (max(length, budget + 3) - len(right))
        wrong = [(token + 1) % self.vocab_size for token in right]
        return {
            "right": right[:length],
            "wrong": wrong[:length],
            "right then wrong": right[: length // 2] + wrong[length // 2 : length],
            "wrong then right": wrong[:1] + right[1:length],
            "edge ids": [0, self.vocab_size - 1] * (length // 2),
            "empty": [],
            "too long": right[: budget + 3],
        }[kind]

    def commit(self, length: int) -> None:
        """Nothing to do: the history says it all."""

    def reset(self) -> None:
        """Begin the plan anew."""
        self.round = 0
        self.histories = []


def plans(longest: int = 17) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Plans of up to a dozen rounds."""
    step = st.tuples(st.sampled_from(KINDS), st.integers(0, longest))
    return st.lists(step, min_size=1, max_size=12)
