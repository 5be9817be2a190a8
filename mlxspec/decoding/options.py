"""How a speculative decoder is to draft and verify."""

from __future__ import annotations

from dataclasses import dataclass

from mlxspec.numbers import whole_number

DEFAULT_NUM_DRAFT_TOKENS = 7


@dataclass(frozen=True)
class SpeculativeDecodingOptions:
    """Options of `SpeculativeDecoder`, checked when they are made.

    Attributes:
        num_draft_tokens: Most tokens to draft per round; 0 decodes plainly. A round drafts fewer
            where one forward, the context or `max_tokens` has no room for more. None: as many
            as pay, or 7 where `adaptive` is False.
        align_proposals: Shorten a proposal to what one forward holds. Without it a proposal may
            be as long as the engine verifies at all, at one forward per tile and span it
            touches; one of adaptive length is never longer than a tile.
        adaptive: Whether to draft as many tokens as pay, see `AdaptiveDraftCount`, of at most
            `num_draft_tokens`. None: if `num_draft_tokens` is None.
    """

    num_draft_tokens: int | None = None
    align_proposals: bool = True
    adaptive: bool | None = None

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            count = whole_number("num_draft_tokens", self.num_draft_tokens, 0)
            object.__setattr__(self, "num_draft_tokens", count)
        if not isinstance(self.align_proposals, bool):
            raise ValueError(
                f"align_proposals: expected True or False, got {self.align_proposals!r}"
            )
        if self.adaptive is not None and not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive: expected True, False or None, got {self.adaptive!r}")

    @property
    def adapts(self) -> bool:
        """Whether the number of draft tokens follows from what pays."""
        if self.num_draft_tokens == 0:
            return False
        return self.num_draft_tokens is None if self.adaptive is None else self.adaptive

    @property
    def most_draft_tokens(self) -> int | None:
        """Most tokens to draft per round; None for no limit of its own."""
        if self.num_draft_tokens is None and not self.adapts:
            return DEFAULT_NUM_DRAFT_TOKENS
        return self.num_draft_tokens
