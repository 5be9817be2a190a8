"""The compiled forwards of fixed width, and the count of their traces."""

from __future__ import annotations

import threading
import weakref
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
    more per call than a small model's forward. MLX's compile cache belongs to a thread, so a
    tile is traced once per thread that calls it.
    """

    def __init__(self, model: nn.Module, layout: StateLayout):
        self._model = model
        self._raw = raw_head(model)
        self._layout = layout
        # The compiled function, and the one that it calls to be traced.
        self._tiles: dict[TileKey, tuple[TileFunction, TileFunction]] = {}
        self._traced = _TracedInThisThread()
        self._compiled: bool | None = None
        self.trace_count = 0

    def get(self, key: TileKey) -> TileFunction:
        """The compiled forward of this key.

        Returns:
            A function of (tokens int32 [1, width], start int32 [], noise key uint32 [2], slots,
            recurrent states) that returns (outputs, slots, recurrent states). The slots passed
            in are consumed. Outputs are `[]` for prefill, else int32 [2, width] with the argmax
            and the NaN count of every row, then the logits and top-k that `capture` names.
        """
        if key not in self._tiles:
            forward = self._forward(key)
            self._tiles[key] = _compiled_of(forward), forward
        elif key in self._traced.keys and self._compiled is None:
            self._compiled = True
        return self._tiles[key][0]

    @property
    def final_cap(self) -> float | None:
        """The model's final soft cap, where its raw logits can be had."""
        return self._raw.cap

    @property
    def compiled(self) -> bool | None:
        """Whether MLX compiles: None until a tile has been called twice by one thread.

        Where MLX cannot compile (no C++ compiler on Linux) it runs the Python function at every
        call, which shows as a second trace of one key in one thread.
        """
        return self._compiled

    def forget_other_capacities(self, capacity: int) -> None:
        """Drop the tiles whose arrays had another capacity: they cannot be called again."""
        self._tiles = {key: tile for key, tile in self._tiles.items() if key.capacity == capacity}

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
                self._count_trace(key)
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
            self._count_trace(key)
            return outputs, *state

        return forward

    def _count_trace(self, key: TileKey) -> None:
        """A trace has come to its end: one that Ctrl-C ends is made again."""
        self.trace_count += 1
        if key in self._traced.keys:
            self._compiled = False
        self._traced.keys.add(key)


# What MLX was given to compile, and must not be freed; see `_compiled_of`.
_given: list[TileFunction] = []


def _compiled_of(function: TileFunction) -> TileFunction:
    """`mx.compile`, of a function at whose address no other one will ever be.

    MLX finds a graph by the address of the function, and where several threads have called it
    does not forget all of its graphs when it goes (0.32.4, measured): the next function at that
    address would be answered from a graph of the old one, silently. So what MLX is given is kept
    for good. It is small: what it calls, and with it the model, it does not keep.
    """
    called = weakref.ref(function)

    def traced(*arguments: Any) -> tuple[Arrays, Arrays, Arrays]:
        forward = called()
        assert forward is not None, "a tile is called by who holds it"
        return forward(*arguments)

    _given.append(traced)
    compiled: TileFunction = mx.compile(traced)
    return compiled


class _TracedInThisThread(threading.local):
    """The keys the calling thread has traced."""

    def __init__(self) -> None:
        self.keys: set[TileKey] = set()
