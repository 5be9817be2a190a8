"""A step under way whose token the host has not read, and what it must not cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxspec.engine.protocol import Capture
from mlxspec.engine.rows import DecodeTile
from mlxspec.engine.state.model_state import Checkpoint

# Whether a step was submitted with nothing under way, with another, or unlike the next one.
Submitted = Literal["alone", "ahead", "incomparable"]

# Copying this many bytes costs about what a wait between two steps does.
_CHEAP_TO_COPY = 16 << 20
# So often in a row memory has to have grown before it is put down to copies: on a busy machine
# chance alone does it now and then, as temporaries are freed while the host looks elsewhere.
_ENOUGH = 3
# And by nearly the same: the state has the same size each time.
_ALIKE = 0.1
# Copies take as many bytes as the state; temporaries may differ a little.
_LARGEST = 1.5


@dataclass(frozen=True)
class StepAhead:
    """One token's forward, submitted before the token was read.

    Attributes:
        position: Of the token.
        chosen_by: The tile whose last row chose the token.
        capture: What the step brings back.
        noise_key: uint32 [2], or None.
        tile: The forward.
        checkpoints: Recurrent states that it leads to, which nobody has adopted yet.
    """

    position: int
    chosen_by: DecodeTile
    capture: Capture
    noise_key: mx.array | None
    tile: DecodeTile
    checkpoints: list[Checkpoint]

    def serves(self, block: list[int], capture: Capture, noise_key: mx.array | None) -> bool:
        """Whether this is the forward of such a call of `verify` at its position.

        The token comes with the tile that chose it. To read the array that the step was given
        would be to wait for the step: MLX knows all that one call submits to be there when the
        last of it is.
        """
        return (
            capture == self.capture
            and noise_key is self.noise_key
            and block == [self.chosen_by.choice]
        )

    @property
    def nan_counts(self) -> mx.array:
        """int32 [rows], padding included."""
        return self.tile.outputs[0][1]

    @property
    def end(self) -> int:
        """One past the last slot that was written, padding included."""
        return self.tile.end


class CopyWatch:
    """Notices by MLX's memory where steps submitted ahead copy the state.

    MLX writes in place only where nothing else holds a buffer. On the CPU backend the readers of
    one step are done before the next step's write is dispatched (measured down to models of one
    layer). On a GPU, by MLX's source, a command buffer that has not completed may hold all that
    it reads. So what memory grows by when a step is submitted with nothing under way, which is
    its temporaries, is compared with what it grows by when the next one is. The growth of later
    ones tells nothing: each frees its predecessor's copies while it makes its own. Memory is the
    whole process's, and so nothing is put down to copies that is larger than they could be, or not
    nearly the same each time.

    Attributes:
        copies: How many bytes more it grew by, once that was dear and seen often enough; else 0.
    """

    def __init__(self) -> None:
        self._alone: int | None = None
        self._doubts = False
        self._seen = 0
        self._more = 0
        self.copies = 0

    @property
    def awaits(self) -> bool:
        """Whether the next step shall wait: for good, or to be the first of two once more."""
        return self._doubts or self.copies > 0

    @property
    def compares(self) -> bool:
        """Whether the growth of a step submitted ahead tells something now."""
        return self._alone is not None

    def alone(self, growth: int) -> None:
        """The engine submitted a step with nothing under way, and memory grew by so many bytes."""
        self._alone, self._doubts = growth, False

    def incomparable(self) -> None:
        """A step was submitted whose growth tells nothing of the next one's."""
        self._alone = None

    def ahead(self, growth: int, state: int) -> None:
        """It submitted one with another under way; the state has so many bytes."""
        if self._alone is None:
            return
        more, self._alone = growth - self._alone, None
        self._doubts = _CHEAP_TO_COPY < more <= _LARGEST * state
        alike = abs(more - self._more) <= _ALIKE * more
        self._seen = (self._seen + 1 if alike else 1) if self._doubts else 0
        self._more = more
        if self._seen >= _ENOUGH:
            self.copies = more

    @property
    def note(self) -> str:
        """What a user is told where steps are awaited."""
        return (
            f"every step is awaited: submitted ahead, one takes {self.copies >> 20} MB more of "
            "memory, as if keys and values were copied"
        )
