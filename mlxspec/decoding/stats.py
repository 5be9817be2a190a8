"""What speculation did: counted as it happens, so that nothing about it is silent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mlxspec.numbers import counted


@dataclass
class SpeculationStats:
    """Counters of one generation, or of several if the same object is passed on.

    Attributes:
        why_off: Why nothing is drafted; None where speculation is on.
        seed: The seed of what was drawn; None where nothing is drawn.
        note: What the engine has to say about itself, or None.
        compiled: Whether MLX compiles the engine's graphs; None where it could not tell yet.
        rounds: Times the decoder drafted, verified and accepted.
        plain_rounds: Rounds whose draft was empty.
        parked_rounds: Those of them that could have drafted, had it paid.
        pipelined_rounds: Rounds whose plain step was submitted before the token that it begins
            with was read. A text that ends early leaves one more such step unused.
        draft_lengths: How long the drafts were over time: [tokens, rounds] for every run of
            rounds that drafted alike.
        tile_widths: Rounds by the rows of their tile.
        forwards: Decode forwards; equal to `rounds` while proposals are aligned.
        draft_forwards: Forwards of draft models, those over the prompt included.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those of them that the engine still held from the turn before.
        lost_tokens: Those that it had processed too and no longer held, so that they were
            processed again: sliding windows and recurrent layers go back only so far.
        prefill_forwards: Forwards over the prompt.
        drafted: Draft tokens verified.
        accepted: Draft tokens the model agreed with.
        emitted: Tokens emitted.
        forced: Emitted tokens that a constraint left no alternative to.
        traces: Graphs traced; none after warm-up inside one span.
        nan_rows: Emitted tokens whose row of logits held NaNs beside numbers.
        seconds: Wall time in parts: "prefill", "draft", "verify". A draft model and the target
            wait for each other on the device alone, so what a draft took beyond its submission
            is told by the last ones that were waited for, and counted as "draft".
    """

    why_off: str | None = None
    seed: int | None = None
    note: str | None = None
    compiled: bool | None = None
    rounds: int = 0
    plain_rounds: int = 0
    parked_rounds: int = 0
    pipelined_rounds: int = 0
    draft_lengths: list[list[int]] = field(default_factory=list)
    tile_widths: dict[int, int] = field(default_factory=dict)
    forwards: int = 0
    draft_forwards: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    lost_tokens: int = 0
    prefill_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    forced: int = 0
    traces: int = 0
    nan_rows: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
    )

    @property
    def speculating(self) -> bool:
        """Whether drafts are made at all."""
        return self.why_off is None

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token, 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per decode forward; 1 is what plain decoding has."""
        return self.emitted / self.forwards if self.forwards else 0.0

    @property
    def forwards_saved(self) -> int:
        """Forwards that plain decoding would have needed beyond these."""
        return self.emitted - self.forwards

    def add(self, other: SpeculationStats) -> None:
        """Add another generation's counters to these; of what is no counter, the latest stays."""
        for name in (each.name for each in fields(self)):
            value = getattr(other, name)
            if isinstance(value, dict):
                mine = getattr(self, name)
                value = {key: mine.get(key, 0) + value.get(key, 0) for key in mine | value}
            elif isinstance(value, list):
                value = getattr(self, name) + value
            elif isinstance(value, int | float) and not isinstance(value, bool) and name != "seed":
                value += getattr(self, name)
            setattr(self, name, value)

    def count_round(self, width: int, drafts: int, *, pipelined: bool) -> None:
        """A round verified this many drafts in a tile of this many rows."""
        self.rounds += 1
        self.pipelined_rounds += pipelined
        self.plain_rounds += not drafts
        self.drafted += drafts
        self.tile_widths[width] = self.tile_widths.get(width, 0) + 1
        if self.draft_lengths and self.draft_lengths[-1][0] == drafts:
            self.draft_lengths[-1][1] += 1
        else:
            self.draft_lengths.append([drafts, 1])

    def summary(self) -> str:
        """One line for a person; others name the engine's note and the seed where there are any."""
        if self.why_off is not None:
            line = f"Speculation: off ({self.why_off}); {counted(self.forwards, 'forward')}"
        else:
            line = (
                f"Speculation: {counted(self.rounds, 'round')}, "
                f"{counted(self.forwards, 'forward')}, {self.drafted} drafted, "
                f"{self.accepted} accepted ({self.acceptance_rate:.0%}), "
                f"{counted(self.forwards_saved, 'forward')} saved "
                f"({self.tokens_per_forward:.2f} tokens per forward)"
            )
            if self.parked_rounds:
                line += f"; {counted(self.parked_rounds, 'round')} parked, as no draft paid"
        if self.forced:
            line += f"; {self.forced} forced by the grammar"
        if self.compiled is False and self.traces:
            line += "; uncompiled: MLX compiles nothing here (on Linux it needs a C++ compiler)"
        lines = [line, self.note and f"Engine: {self.note}"]
        if self.reused_tokens or self.lost_tokens:
            again = f", {self.lost_tokens} processed again" if self.lost_tokens else ""
            lines.append(
                f"Turns: {self.reused_tokens} of {counted(self.prompt_tokens, 'prompt token')} "
                f"reused{again}"
            )
        if self.seed is not None:
            lines.append(f"Seed: {self.seed}")
        return "\n".join(filter(None, lines))

    def as_dict(self) -> dict[str, Any]:
        """The counters and the ratios made of them, ready for JSON."""
        return asdict(self) | {
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_forward": self.tokens_per_forward,
            "forwards_saved": self.forwards_saved,
        }
