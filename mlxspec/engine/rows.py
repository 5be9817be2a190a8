"""What decode tiles return, and the rows of a block put together from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlxspec.engine.protocol import Capture, VerifyRows


@dataclass(frozen=True)
class DecodeTile:
    """One decode forward under way.

    Attributes:
        outputs: What the tile returned, see `Tiles.get`.
        rows: The rows that belong to the block, without re-fed tokens and padding.
        end: One past the last slot the tile wrote, padding included.
    """

    outputs: list[mx.array]
    rows: slice
    end: int

    @cached_property
    def head(self) -> tuple[list[int], list[int]]:
        """The argmax and the NaN count of every row, padding included; read from the device."""
        read: Any = self.outputs[0].tolist()
        argmax, nan_count = read
        return argmax, nan_count

    @property
    def choice(self) -> int:
        """The argmax of the block's last row; read from the device."""
        return self.head[0][self.rows.stop - 1]

    @property
    def is_non_finite(self) -> bool:
        """Whether a row, and so what it wrote, is not a number."""
        return any(self.head[1])


def rows_of(
    tiles: Sequence[DecodeTile],
    capture: Capture,
    final_cap: float | None,
    drafted: list[int],
    *,
    ahead: bool,
) -> VerifyRows:
    """The block's rows of tiles that have been computed, in order.

    Args:
        tiles: At least one.
        capture: What they brought back.
        final_cap: Of raw logits, the soft cap that is left to be applied.
        drafted: Drafts that were read back with them.
        ahead: Whether the step after the block is under way.
    """
    argmax: list[int] = []
    nan_count: list[int] = []
    for tile in tiles:
        argmax += tile.head[0][tile.rows]
        nan_count += tile.head[1][tile.rows]
    captured = [
        mx.concatenate(list(parts)) if len(parts) > 1 else parts[0]
        for parts in zip(*([o[t.rows] for o in t.outputs[1:]] for t in tiles), strict=True)
    ]
    logits = captured.pop(0) if capture.logits else None
    top_values, top_indices = captured if capture.top_k else (None, None)
    return VerifyRows(
        argmax, nan_count, len(tiles), logits, top_values, top_indices, final_cap, drafted, ahead
    )
