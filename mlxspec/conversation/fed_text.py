"""A conversation as text and as token ids: what was emitted is fed again as it was emitted.

A tokenizer may cut an answer's text otherwise than the model did that wrote it. An engine, which
compares ids, could then go on only from before the answer. So the ids of the answer are kept,
wherever the chat template gives back the very text they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class FedText:
    """A text and the ids that stand for it.

    Attributes:
        text: The conversation as the chat template renders it, and what was emitted after it.
        ids: Its token ids.
        cuts: (characters, ids) from which on both begin anew together, ascending.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    cuts: tuple[tuple[int, int], ...] = ()

    def rendered_anew(self, text: str, encode: Encode) -> FedText:
        """The conversation one message later: known ids as far as its text is the known one.

        Templates change what they rendered before: they strip spaces and thoughts, or move the
        system message. From the last cut before a change the ids are the tokenizer's. They are
        throughout where the tokenizer joins characters over the cut.

        Args:
            text: The rendered conversation.
            encode: Gives the ids of a text.
        """
        whole = encode(text)
        for place, (characters, count) in reversed(list(enumerate(self.cuts))):
            known = self.text[:characters]
            if text.startswith(known) and whole[: len(before := encode(known))] == before:
                ids = self.ids[:count] + whole[len(before) :]
                return FedText(text, ids, (*self.cuts[: place + 1], (len(text), len(ids))))
        return FedText(text, whole, ((len(text), len(whole)),))

    def extended(self, text: str, ids: list[int]) -> FedText:
        """This text with what was emitted after it, a cut at its end."""
        text, ids = self.text + text, self.ids + ids
        return FedText(text, ids, (*self.cuts, (len(text), len(ids))))
