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
            where one forward, the context or `max_tokens` has no room for more.
        align_proposals: Shorten a proposal to what one forward holds. Without it a proposal may
            be as long as the engine verifies at all, at one forward per tile and span it touches.
    """

    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    align_proposals: bool = True

    def __post_init__(self) -> None:
        count = whole_number("num_draft_tokens", self.num_draft_tokens, 0)
        object.__setattr__(self, "num_draft_tokens", count)
        if not isinstance(self.align_proposals, bool):
            raise ValueError(
                f"align_proposals: expected True or False, got {self.align_proposals!r}"
            )
