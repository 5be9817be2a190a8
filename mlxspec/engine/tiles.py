"""The compiled forwards of fixed width, and the count of their traces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.engine.heads import raw_head
from mlxspec.engine.protocol import Capture
from mlxspec.engine.state import StateLayout, TileFrame
from mlxspec.scan import LogitRowScan

Arrays = list[mx.array]
TileFunction = Callable[
    [mx.array, mx.array, mx.array, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]
]


@dataclass(frozen=True)
class TileKey:
    """What makes one graph differ from another.

    Attributes:
        width: Rows.
        span: Slots every row attends to.
        capacity: Tokens the slots have room for; it only changes where the span does.
        capture: What the rows bring back; None for prefill, whose logits are never computed.
    """

    width: int
    span: int
    capacity: int
    capture: Capture | None


class Tiles:
    """Traces a tile when it is first needed and keeps it.

    The model's weights are constants of the graphs: hundreds of arrays as arguments would cost
    more per call than a small model's forward. MLX's compile cache belongs to a thread, so every
    thread that calls a tile has its own of it.

    Attributes:
        trace_count: How often a tile was traced, in all threads.
        compiled: Whether MLX compiles: None until a tile has been called twice by one thread.
            Where MLX cannot compile (no C++ compiler on Linux) it runs the Python function at
            every call.
    """

    def __init__(self, model: nn.Module, layout: StateLayout):
        self._model = model
        self._raw = raw_head(model)
        self._layout = layout
        self._own = _TilesOfThisThread()
        self.compiled: bool | None = None
        self.trace_count = 0

    def get(self, key: TileKey) -> TileFunction:
        """The compiled forward of this key, for the calling thread.

        A new one takes the place of the thread's others whose arrays had another capacity, which
        the state has left behind.

        Returns:
            A function of (tokens int32 [1, width], start int32 [], noise key uint32 [2], slots,
            recurrent states) that returns (outputs, slots, recurrent states). The slots passed
            in are consumed. Outputs are `[]` for prefill, else int32 [2, width] with the argmax
            and the NaN count of every row, then the logits and top-k that `capture` names.
        """
        own = self._own
        tile = own.tiles.get(key)
        if tile is None:
            tile = _Tile(self._forward(key), self._called)
            own.tiles = {k: t for k, t in own.tiles.items() if k.capacity == key.capacity}
            own.tiles[key] = tile
        return tile

    @property
    def final_cap(self) -> float | None:
        """The model's final soft cap, where its raw logits can be had."""
        return self._raw.cap

    def _called(self, traced: bool, again: bool) -> None:
        """Count a call that has come to its end."""
        self.trace_count += traced
        if again:
            self.compiled = not traced

    def _forward(self, key: TileKey) -> TileFunction:
        layout = self._layout
        # Whoever takes logits away takes the model's own; the scan can cap as it reads.
        capture = key.capture
        taken = capture is not None and (
            capture.scores is not None or (capture.logits and not capture.raw)
        )
        model, cap = (self._model, None) if taken else self._raw

        def forward(
            tokens: mx.array,
            start: mx.array,
            noise_key: mx.array,
            slots: Arrays,
            recurrent: Arrays,
        ) -> tuple[Arrays, Arrays, Arrays]:
            frame = TileFrame(key.width, key.span, start, prefill=key.capture is None)
            caches = layout.bind(slots, recurrent, frame)
            logits = model(tokens, cache=caches)[0]
            state = layout.collect(caches)
            if key.capture is None:
                return [], *state
            rows = LogitRowScan(cap=cap, top_k=key.capture.top_k)(logits)
            choice = rows.argmax
            if key.capture.scores is not None:
                choice = LogitRowScan()(
                    key.capture.scores(logits, frame.rows + 1, noise_key)
                ).argmax
            outputs = [mx.stack([choice.astype(mx.int32), rows.nan_count.astype(mx.int32)])]
            if key.capture.logits:
                outputs.append(logits)
            if rows.top_values is not None and rows.top_indices is not None:
                outputs += [rows.top_values, rows.top_indices]
            return outputs, *state

        return forward


class _Tile:
    """A forward as one thread has compiled it.

    MLX finds a graph by the address of the function, thread by thread, and when the function goes
    it forgets what the thread that called it last has compiled (0.32.4, measured). What another
    one has compiled it keeps, with all of the model's weights, and answers the next function at
    that address from it, silently. So no two threads share a function.

    Args:
        forward: What is compiled.
        called: Told after every call whether it was traced, and whether calls like it had come to
            their end before: by the same stream, with arrays of the same shapes.
    """

    def __init__(self, forward: TileFunction, called: Callable[[bool, bool], None]):
        self._called = called
        # Of the traces whose calls have come to their end, and of the one that was made last.
        self._circumstances: set[Any] = set()
        self._traced: Any = None

        def traced(*arguments: Any) -> tuple[Arrays, Arrays, Arrays]:
            result = forward(*arguments)
            arrays = [*arguments[-2], *arguments[-1]]
            stream = str(mx.default_stream(mx.default_device()))
            self._traced = (stream, *(tuple(array.shape) for array in arrays))
            return result

        self._compiled: TileFunction = mx.compile(traced)

    def __call__(self, *arguments: Any) -> tuple[Arrays, Arrays, Arrays]:
        self._traced = None
        result = self._compiled(*arguments)
        traced = self._traced
        self._called(traced is not None, traced is None or traced in self._circumstances)
        if traced is not None:
            self._circumstances.add(traced)
        return result


class _TilesOfThisThread(threading.local):
    """The tiles that the calling thread has compiled."""

    def __init__(self) -> None:
        self.tiles: dict[TileKey, _Tile] = {}
