"""Stop strings: where a text ends, though its tokens end elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may become one.

    Args:
        strings: What ends the text; none of it is passed on. Of several the earliest wins.

    Raises:
        ValueError: A stop string is empty, or is no string.
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            raise ValueError(f"stop_strings: expected several strings, got one, {strings!r}")
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop_strings: expected strings that are not empty: {string!r}")
        self.strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def completed_by(self, text: str) -> bool:
        """Whether this next piece of text would complete a stop string."""
        return any(string in self._held + text for string in self.strings)

    def feed(self, text: str, last: bool = False) -> str:
        """Take the next piece of text and return what is certain.

        Args:
            text: The next piece.
            last: Whether no other follows, so that nothing is held back.

        Returns:
            Text that no stop string touches. `found` then says whether the text has ended.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        found = [(text.find(string), string) for string in self.strings if string in text]
        if found:
            end, self.found = min(found, key=lambda place: place[0])
            self._held = ""
            return text[:end]
        keep = 0 if last else self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = max((len(string) - 1 for string in self.strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self.strings):
                return length
        return 0
