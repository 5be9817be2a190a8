"""Prompt lookup: the text itself as the drafter.

What a model writes often stood in its context before. The last few tokens are looked up among all
earlier ones, and what followed them then is the guess (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

# How far back a match is counted: a longer one says nothing more.
_LONGEST_COUNTED = 64


class PromptLookup:
    """Implements `Drafter` with an index of n-grams, extended by every token once.

    The longest n-gram is tried first, and of its occurrences the most recent. Prompt and output
    are searched alike. A match that runs into the end of the history goes on periodically: the
    tokens between the match and the end are taken to repeat.

    Args:
        min_ngram: Fewest tokens that must match. Short matches are cheap to find and mostly wrong.
        max_ngram: Most tokens to look for; a match may turn out to be longer, see `source`.

    Raises:
        ValueError: Not `1 <= min_ngram <= max_ngram`.
    """

    def __init__(self, min_ngram: int = 3, max_ngram: int = 8):
        if min_ngram < 1:
            raise ValueError(f"min_ngram: expected at least 1 token, got {min_ngram}")
        if max_ngram < min_ngram:
            raise ValueError(
                f"max_ngram: expected at least min_ngram ({min_ngram}) tokens, got {max_ngram}"
            )
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.match_length = 0
        self.reset()

    @property
    def source(self) -> tuple[str, int]:
        """Lookup, and how many tokens matched: the longer the match, the further it holds."""
        return "lookup", self.match_length

    def reset(self) -> None:
        """Forget every token."""
        # For each n, the n-grams seen and the position of the token that followed each last.
        self._followers: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(self.min_ngram, self.max_ngram + 1)
        }
        self._indexed = 0
        self.match_length = 0

    def commit(self, length: int) -> None:
        """Accept that `length` tokens are final; fewer than were indexed empties the index."""
        if length < self._indexed:
            self.reset()

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """Guess up to `budget` tokens from what followed the same n-gram before.

        `match_length` then says how many tokens matched, 0 for none. It is not bounded by
        `max_ngram`, which tells only how many are looked for, but by 64.
        """
        self._extend_index(history)
        self.match_length = 0
        if budget <= 0:
            return []
        end = len(history)
        suffix = tuple(history[max(0, end - self.max_ngram) : end])
        for n in range(min(self.max_ngram, len(suffix)), self.min_ngram - 1, -1):
            follower = self._followers[n].get(suffix[-n:])
            if follower is not None:
                self.match_length = n if n < self.max_ngram else self._extent(history, follower)
                found = list(history[follower : min(follower + budget, end)])
                period = end - follower
                return [found[i % period] for i in range(budget)]
        return []

    def _extent(self, history: Sequence[int], follower: int) -> int:
        """How many tokens before the follower equal the history's last ones."""
        end = len(history)
        matched = self.max_ngram
        most = min(follower, _LONGEST_COUNTED)
        while matched < most and history[follower - 1 - matched] == history[end - 1 - matched]:
            matched += 1
        return matched

    def _extend_index(self, history: Sequence[int]) -> None:
        """Index every n-gram that has a follower; the last one of the history has none yet."""
        if len(history) < self._indexed:
            self.reset()
        for follower in range(max(1, self._indexed), len(history)):
            ngram = tuple(history[max(0, follower - self.max_ngram) : follower])
            for n in range(self.min_ngram, len(ngram) + 1):
                self._followers[n][ngram[-n:]] = follower
        self._indexed = len(history)
