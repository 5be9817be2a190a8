"""Which tile widths compute the same bits on this device, measured and remembered.

Kernels are chosen by the number of rows, and another kernel may round another way. A text can only
be the same with and without drafts if every width it meets computes a row alike.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxspec.engine.measurements import remember, remembered
from mlxspec.engine.protocol import Capture, SpeculativeEngine


def width_classes(engine: SpeculativeEngine, widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of widths whose rows are equal bit for bit, at every index of a row.

    One tile of each width computes the first positions. A second tile of each starts in the
    middle of the first, so that the same positions fall on other rows: a width whose own rows
    differ is equal to nothing, itself included. Kernels change with the length of the context
    and with quantised keys: this looks at those that are met where the engine stands.

    Args:
        engine: An engine whose ladder has these widths and that stands at the beginning of a
            span; it is left as it was.
        widths: Ascending.

    Returns:
        The groups, each ascending; a width stands in the first group that it is equal to, and one
        whose own rows differ in none.
    """
    begin = engine.processed_token_count
    tokens = [(37 * i + 11) % engine.vocab_size for i in range(widths[-1] + widths[-1] // 2)]

    def rows(*blocks: list[int], begin: int = begin) -> mx.array:
        """Logits of the last block's rows after the others, from a position on."""
        engine.reset(begin)
        for block in blocks:
            logits = engine.verify(block, Capture(logits=True)).logits
        assert logits is not None
        return logits

    first: dict[int, mx.array] = {}
    for width in widths:
        # The last token of a context is never processed.
        first[width] = rows(tokens[: min(width, engine.max_context_length - 1 - begin)])
        middle = width // 2
        if middle and begin + middle + width <= engine.max_context_length - 1:
            if getattr(engine, "is_recurrent", False):
                shifted = rows(tokens[:middle], tokens[middle : middle + width])
            else:
                # What stands before the second tile is this width's work too.
                rows(tokens[:width])
                shifted = rows(tokens[middle : middle + width], begin=begin + middle)
            common = width - middle
            if not mx.array_equal(shifted[:common], first[width][middle:], equal_nan=True):
                del first[width]
    engine.reset(begin)
    classes: list[list[int]] = []
    for width, own in first.items():
        for group in classes:
            common = min(len(own), len(first[group[-1]]))
            if mx.array_equal(own[:common], first[group[-1]][:common], equal_nan=True):
                group.append(width)
                break
        else:
            classes.append([width])
    return [tuple(group) for group in classes]


def best_class(classes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The group to decode in: the one with most widths, of several the one that reaches widest."""
    return max(classes, key=lambda group: (len(group), group[-1]))


def remembered_classes(circumstances: dict[str, Any]) -> list[tuple[int, ...]] | None:
    """What was measured before in these circumstances; None if nothing was."""

    def read(stored: dict[str, Any]) -> list[tuple[int, ...]]:
        classes = [tuple(map(int, group)) for group in stored["classes"]]
        asked, found = circumstances["engine"]["widths"], [w for group in classes for w in group]
        if not all(classes) or len(set(found)) < len(found) or not set(found) <= set(asked):
            raise ValueError("no classes of these widths")
        return classes

    return remembered(circumstances, read)


def remember_classes(circumstances: dict[str, Any], classes: list[tuple[int, ...]]) -> None:
    """Keep a measurement; where the cache cannot be written it is measured again next time."""
    remember(circumstances, {"classes": classes})
