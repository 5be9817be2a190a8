"""Where in a sequence an engine changes what it computes, and so where it has to be looked at."""

from __future__ import annotations

from dataclasses import dataclass

from mlxspec.engine import StaticShapeEngine
from mlxspec.engine.regimes import KERNEL_CHANGES

# A window that ends further on takes a text that nobody calls a quick look.
_QUICK_REACH = 2048
_MARGIN = 8


@dataclass(frozen=True)
class Place:
    """A stretch of the sequence.

    Attributes:
        name: What a person calls it.
        start: Position of the token after which the first is generated.
        length: Tokens generated and scored.
    """

    name: str
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position of the last token generated."""
        return self.start + self.length


def places(
    engine: StaticShapeEngine, prompt_length: int, max_tokens: int, up_to: int | None
) -> tuple[list[Place], list[Place]]:
    """The places that a context has: the prompt's end, and where the engine changes.

    Those are ends of spans (the first after the prompt), of sliding windows with the ring that
    holds them, and the numbers of keys at which attention changes kernels.

    Args:
        engine: The engine that generates.
        prompt_length: Tokens of the prompt.
        max_tokens: Tokens to generate after it.
        up_to: How far to look, in tokens; None is the first span's and every window's end, if
            that is not far.

    Returns:
        Those to look at, and those further on.
    """
    room = engine.max_context_length
    first = Place("prompt", prompt_length - 1, min(max_tokens, room - prompt_length))
    around = 2 * engine.verify_tile_width + 2 * _MARGIN
    # Longer than the part of a ring that is deeper than its window, which is three widest tiles:
    # so far may a block go that is rejected whole.
    past_window = 4 * engine.verify_tile_width + 2 * _MARGIN
    span_end = engine.span_end(prompt_length - 1)
    near = [_around(f"span of {span_end}", span_end, around)]
    near += [
        Place(f"window of {window}", max(1, window - _MARGIN), past_window)
        for window in engine.windows
        if prompt_length < window + past_window
    ]
    far = [_around(f"{keys} keys", keys, around) for keys in KERNEL_CHANGES]
    found = [p for p in _merged([*near, *far]) if prompt_length <= p.end < room and p.start >= 1]
    # What the prompt's own answer runs across needs no second look.
    found = [p for p in found if not (first.start <= p.start and p.end <= first.end)]
    if up_to is None:
        quick = {p.name for p in near if p.end <= _QUICK_REACH}
        seen = [p for p in found if quick & set(p.name.split(", "))]
    else:
        seen = [p for p in found if p.end <= up_to]
    return [first, *seen], [p for p in found if p not in seen]


def _around(name: str, position: int, length: int) -> Place:
    return Place(name, position - length // 2, length)


def _merged(found: list[Place]) -> list[Place]:
    """The places in order, those that are nearly one made one."""
    merged: list[Place] = []
    for place in sorted(found, key=lambda place: place.start):
        if merged and abs(merged[-1].start - place.start) <= _MARGIN // 2:
            last = merged.pop()
            name = ", ".join(dict.fromkeys([last.name, place.name]))
            length = max(last.end, place.end) - last.start
            place = Place(name, last.start, length)
        merged.append(place)
    return merged
