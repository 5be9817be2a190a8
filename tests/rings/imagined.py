"""A static engine whose model is imagined: its state is plain Python, and every read is checked.

The engine's own code decides where tiles start, what is written and what may be rewound; in
place of a model, a tile writes (position, token) into slots and asks for every key that its rows
would attend to. What it does not find is a wrong allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxspec import StaticShapeEngine
from mlxspec.engine.state import ModelState, RingRule
from tests.cases import varied_model

VOCAB = 1000
_PADDING = -1


class ImaginedSlots:
    """Slots of one layer: (position, token) each. A copy is another state."""

    def __init__(self, depth: int, slots: dict[int, tuple[int, int]] | None = None):
        self.depth = depth
        self.slots = dict(slots or {})

    def written(self, start: int, tokens: Sequence[int]) -> ImaginedSlots:
        """With the rows of a tile, of which only the last `depth` stay."""
        new = ImaginedSlots(self.depth, self.slots)
        rows = list(enumerate(tokens, start))[-self.depth :]
        new.slots.update({position % self.depth: (position, token) for position, token in rows})
        return new

    def holds(self, positions: Sequence[int], history: Sequence[int]) -> bool:
        """Whether these positions of the history are found in their slots."""
        return all(self.slots.get(k % self.depth) == (k, history[k]) for k in positions)


class ImaginedLayout:
    """One full-attention layer, a ring per rule, and maybe one recurrent layer."""

    def __init__(self, rules: Sequence[RingRule], recurrent: bool):
        self.rings = frozenset(rules)
        self.rules = [RingRule(10**6, 10**6), *rules]
        self.is_recurrent = recurrent

    def zero_slots(self, capacity: int) -> list[Any]:
        return [ImaginedSlots(rule.depth) for rule in self.rules]

    def zero_recurrent(self) -> list[Any]:
        return [()] if self.is_recurrent else []

    def grow(self, slots: list[Any], capacity: int) -> None:
        pass

    def clear(self, slots: list[Any], begin: int, end: int, high_water: int) -> None:
        for index, layer in enumerate(slots):
            held = min(end, max(high_water, layer.depth))
            slots[index] = layer.written(begin, [_PADDING] * (held - begin))

    def ring_slots(self, slots: list[Any]) -> dict[int, Any]:
        return dict(list(enumerate(slots))[1:])


class ImaginedTiles:
    """Tiles of an engine over an `ImaginedLayout`; a missing key is an error."""

    trace_count = 0
    compiled = None

    def __init__(self, engine: StaticShapeEngine, layout: ImaginedLayout):
        self._engine = engine
        self._layout = layout

    def get(self, key: Any) -> Any:
        def tile(tokens, start, noise_key, slots, recurrent):
            return self._forward(key, tokens.tolist()[0], int(start.item()), slots, recurrent)

        return tile

    def _forward(self, key, tokens, start, slots, recurrent):
        history = self._engine._history
        spans = self._engine._spans
        prefill = key.capture is None
        rows = range(start, start + self._engine.imagined_rows)
        assert tokens[: len(rows)] == history[start : rows.stop]
        # A decode tile crosses no span; prefill takes its last row's.
        assert key.span == spans.span(rows.stop - 1)
        assert prefill or key.span == spans.span(start)
        after = [layer.written(start, tokens) for layer in slots]
        for rule, before, written in zip(self._layout.rules, slots, after, strict=True):
            # The last row sees all that the others see, if the window is no bound.
            for row in rows if rule.window < len(history) else rows[-1:]:
                window = range(max(0, row - rule.window + 1), row + 1)
                if prefill:
                    seen = before.holds([k for k in window if k < start], history)
                else:
                    seen = written.holds(window, history)
                assert seen, (rule, start, row, key)
        states = []
        for state in recurrent:
            assert state == tuple(history[:start]), (start, state)
            states.append(state + tuple(tokens))
        outputs = [] if prefill else [mx.zeros((2, key.width), mx.int32)]
        return outputs, after, states


def imagined_engine(
    windows: Sequence[int],
    widths: Sequence[int],
    placement: str,
    *,
    recurrent: bool = False,
    context: int = 200,
    span_step: int = 16,
    prefill_step_size: int = 16,
) -> StaticShapeEngine:
    """An engine with rings of these windows over imagined arrays."""
    model = varied_model("lfm2") if recurrent else varied_model("llama")
    engine = StaticShapeEngine(
        model,
        max_context_length=context,
        tile_widths=tuple(widths),
        placement=placement,
        span_step=span_step,
        prefill_step_size=prefill_step_size,
    )
    rules = [RingRule.for_decoding(window, widths[-1]) for window in windows]
    layout: Any = ImaginedLayout(rules, recurrent)
    engine._state = ModelState(layout, layout, layout, engine.capacity)
    engine._tiles = {layout: ImaginedTiles(engine, layout)}
    forward = engine._forward

    def forward_of_rows(start, rows, *arguments, **options):
        engine.imagined_rows = rows
        return forward(start, rows, *arguments, **options)

    engine._forward = forward_of_rows
    return engine


def legal_to_go_on(engine: StaticShapeEngine, to: int) -> bool:
    """The truth about a rewind: whether what is held suffices for the tile that computes `to`."""
    state, layout = engine._state, engine._state.layout
    history = list(engine.tokens)
    if to == 0:
        return True
    checkpoint = max((c.position for c in state.checkpoints if c.position <= to), default=0)
    start = engine._place.start(to, checkpoint)
    if layout.is_recurrent and not start == checkpoint <= to < engine._place.end(start):
        return False
    return all(
        slots.holds(range(max(0, start - rule.window + 1), start), history)
        for rule, slots in zip(layout.rules, state.slots, strict=True)
    )
