"""A decoder's engine is its own between two tokens: somebody else's call there is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxspec.engine.protocol import SpeculativeEngine
from mlxspec.errors import EngineBusy


class SoleCaller:
    """Counts on being the only one who calls an engine, and notices where it is not.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: SpeculativeEngine):
        self._engine = engine
        # The engine's calls when it was last left; None while it is called, or after a failure.
        self._calls: int | None = engine.call_count

    @property
    def was_alone(self) -> bool:
        """Whether nobody has called the engine since it was last left in order."""
        return self._engine.call_count == self._calls

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Call the engine inside the block."""
        self._calls = None
        yield
        self._calls = self._engine.call_count

    def refuse_others(self) -> None:
        """Refuse to go on from a text that somebody else has changed.

        Raises:
            EngineBusy: Somebody has.
        """
        if self._calls is not None and not self.was_alone:
            raise EngineBusy(
                "somebody else used this engine between two tokens, so what it holds is not this "
                "text; give every sequence an engine of its own"
            )
