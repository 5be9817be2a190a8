"""Where one tile stands: what every layer of it needs to know, and the masks they share."""

from __future__ import annotations

import mlx.core as mx


class TileFrame:
    """Width, span and position of a tile, for the length of one trace.

    Args:
        width: Rows.
        span: Key slots that full attention attends to.
        start: int32 [], position of the first row.
        prefill: Whether every row is a token to keep, and none a draft or padding.
    """

    def __init__(self, width: int, span: int, start: mx.array, prefill: bool):
        self.width = width
        self.span = span
        self.start = start
        self.prefill = prefill
        self.rows = start + mx.arange(width, dtype=mx.int32)
        self._masks: dict[tuple[int, ...], mx.array] = {}

    def causal_mask(self, window: int | None = None) -> mx.array:
        """Which slot each row sees where slot = position: its own and every earlier one.

        Args:
            window: If given, of those only the last `window`.

        Returns:
            bool [width, span].
        """
        key = (window or 0,)
        if key not in self._masks:
            slots = mx.arange(self.span, dtype=mx.int32)[None]
            mask = slots <= self.rows[:, None]
            if window is not None:
                mask = mask & (slots > self.rows[:, None] - window)
            self._masks[key] = mask
        return self._masks[key]

    def ring_mask(self, window: int, depth: int, slots: int) -> mx.array:
        """Which slot of a ring each row sees: those of the last `window` positions.

        From a row's own slot backwards the ring holds ever earlier positions, so the distance in
        slots is the distance in positions.

        Args:
            window: Positions a row sees, its own included.
            depth: Slots of the whole ring; slot = position mod depth.
            slots: Slots attended to: the first ones, or all.

        Returns:
            bool [width, slots].
        """
        key = (window, depth, slots)
        if key not in self._masks:
            distance = (self.rows[:, None] - mx.arange(slots, dtype=mx.int32)[None]) % depth
            self._masks[key] = (distance < window) & (distance <= self.rows[:, None])
        return self._masks[key]

    def joined_mask(self, window: int, earlier: int) -> mx.array:
        """Which key each row sees among `earlier` positions before the tile and its own rows.

        Args:
            window: Positions a row sees, its own included.
            earlier: Keys that stand before the tile's own; some may lie before position 0.

        Returns:
            bool [width, earlier + width].
        """
        key = (window, -1, earlier)
        if key not in self._masks:
            positions = self.start - earlier + mx.arange(earlier + self.width, dtype=mx.int32)
            distance = self.rows[:, None] - positions[None]
            self._masks[key] = (distance >= 0) & (distance < window) & (positions >= 0)[None]
        return self._masks[key]
