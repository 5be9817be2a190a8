"""What a verification found, for a person and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxspec.numbers import counted

Status = Literal["equal", "near tie", "fault"]


@dataclass(frozen=True)
class Difference:
    """The first row of logits that is not plain decoding's, bit for bit.

    Attributes:
        token: Index of the token that the row chooses, among those generated at the place.
        position: Where that token stands in the sequence.
        width: Rows of the tile that computed the row; None where nobody can tell.
        row: The row's index in its block; None where nobody can tell.
        expected: What plain decoding chooses.
        chosen: What the row chooses.
        margin: How far the expected token's logit is ahead of the chosen one's in plain
            decoding's row; where both are the same, ahead of the runner-up's.
        logits: How many logits differ.
        at_logit: Where they differ most.
        largest: By how much.
        ulps: The same in units of the last place.
    """

    token: int
    position: int
    width: int | None
    row: int | None
    expected: int
    chosen: int
    margin: float
    logits: int
    at_logit: int
    largest: float
    ulps: int

    def __str__(self) -> str:
        tile = "" if self.width is None else f", row {self.row} of a tile of {self.width}"
        choice = (
            f"chooses {self.chosen} instead of {self.expected}, whose logit is"
            if self.chosen != self.expected
            else f"still chooses {self.expected}, whose logit is"
        )
        logits, ulps = counted(self.logits, "logit"), counted(self.ulps, "ulp")
        return (
            f"token {self.token} (position {self.position}{tile}): {logits} other, most by "
            f"{self.largest:.3g} ({ulps}) at {self.at_logit}; {choice} {self.margin:.3g} ahead"
        )


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared with plain decoding.
        place: Where in the sequence.
        status: "equal" is bit for bit, but for mlx-lm's rows, which may round another way. "near
            tie" is a difference no larger than rounding makes in mlx-lm itself; in the class in
            use even that is a "fault".
        in_use: Whether the engine that generates is concerned: only then a fault fails.
        detail: What was seen, for a person.
        difference: The first difference, if there is one that rows can show.
    """

    name: str
    place: str
    status: Status
    in_use: bool
    detail: str
    difference: Difference | None = None

    @property
    def failed(self) -> bool:
        """Whether a promise is broken."""
        return self.in_use and self.status == "fault"


@dataclass(frozen=True)
class Price:
    """What a plain step costs, in milliseconds, and so what exactness costs.

    Attributes:
        exact_width: Rows of the narrowest tile of the class in use.
        exact_ms: A step in it.
        free_width: Rows of the narrowest tile of the whole ladder.
        free_ms: A step in it.
        mlx_lm_ms: A step of mlx-lm's.
    """

    exact_width: int
    exact_ms: float
    free_width: int
    free_ms: float
    mlx_lm_ms: float

    @property
    def exactness(self) -> float:
        """By what share exactness makes a plain step longer; 0 where it takes no wider tile."""
        return 0.0 if self.exact_width == self.free_width else self.exact_ms / self.free_ms - 1

    def __str__(self) -> str:
        against = f"{self.exact_ms:.1f} ms, mlx-lm's {self.mlx_lm_ms:.1f} ms"
        if self.exact_width == self.free_width:
            return f"none: plain steps are in the narrowest tiles (a step takes {against})"
        hint = "; --no-exact saves it" if self.exactness > 0.05 else ""
        return (
            f"{self.exactness:+.0%} a plain step, in tiles of {self.exact_width} instead of "
            f"{self.free_width} rows (a step takes {against}){hint}"
        )


@dataclass(frozen=True)
class Verdict:
    """What `verify_model` found.

    Attributes:
        device: What MLX calls the device.
        versions: Of mlxspec, mlx and mlx-lm.
        tokens: How many tokens were generated after the prompt.
        classes: Groups of the ladder's widths whose rows are equal bit for bit.
        widths: Those that are decoded in.
        note: What the engine has to say about itself, or None.
        places: Where in a sequence it was looked at.
        not_reached: Places that exist and were left out, as they take a longer text.
        price: What exactness costs.
        kernels: The line of the scan kernels' check; None where there is no Metal.
        kernels_passed: Whether they are right; True where there is no Metal.
        checks: Every comparison.
    """

    device: str
    versions: dict[str, str]
    tokens: int
    classes: list[tuple[int, ...]]
    widths: tuple[int, ...]
    note: str | None
    places: list[str]
    not_reached: list[str]
    price: Price
    kernels: str | None
    kernels_passed: bool
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether everything that is promised holds."""
        return self.kernels_passed and not any(check.failed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        price = asdict(self.price) | {"exactness": self.price.exactness}
        return asdict(self) | {"price": price, "passed": self.passed}
