"""The adaptive draft count on a virtual clock: published cost curves, recorded and hostile texts.

    python -m bench.simulate

writes bench/results/simulate.json and .md within seconds; no model is run. Every text is decoded
under every curve by `AdaptiveDraftCount`, plainly, and with every fixed number of drafts, the best
of which is known with hindsight only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.common import RESULTS
from mlxspec.benchmark.provenance import provenance, write_json
from mlxspec.benchmark.tables import markdown_table
from mlxspec.drafting import AdaptiveDraftCount, PromptLookup
from mlxspec.engine.costs import TileCosts

TRACES = Path(__file__).with_name("traces")
DRAFT_TRACES = TRACES / "draft_models.json"
# What the adaptive count is held to: of plain decoding, and of the best fixed number of drafts.
FLOOR, NEAR_BEST = 0.98, 0.95


@dataclass(frozen=True)
class Curve:
    """What tiles cost somewhere.

    Attributes:
        name: Where.
        costs: Seconds, or any unit of time, by rows.
        ladder: Widths of the tiles.
        source: Where the figures come from, and which of them are assumptions.
    """

    name: str
    costs: TileCosts
    ladder: tuple[int, ...]
    source: str

    def width_of(self, drafts: int) -> int:
        """Rows of the tile that verifies so many drafts."""
        return next(width for width in self.ladder if width > drafts)


def _curve(name: str, source: str, ladder: Sequence[int], **by_rows: float) -> Curve:
    points = sorted((int(rows.removeprefix("r")), cost) for rows, cost in by_rows.items())
    return Curve(name, TileCosts(tuple(points)), tuple(ladder), source)


_WIDE = (1, 2, 4, 8, 16, 24, 32)
_NARROW = (1, 2, 4, 8, 16)

CURVES = (
    _curve(
        "OpenBLAS f32",
        "SmolLM2-135M, measured here: 79/147/192/210 ms at 1/16/24/32 rows; 2, 4 and 8 rows as "
        "91, 108 and 126 ms to 84 of a second measurement",
        _WIDE,
        r1=79, r2=86, r4=102, r8=118, r16=147, r24=192, r32=210,
    ),
    _curve(
        "stock wheel f32",
        "SmolLM2-135M, measured here: 224 and 1058 ms at 1 and 8 rows, on a straight line",
        _NARROW,
        r1=224, r8=1058,
    ),
    _curve(
        "stock wheel bf16",
        "SmolLM2-135M, measured here: 170 and 439 ms at 1 and 8 rows, on a straight line",
        _NARROW,
        r1=170, r8=439,
    ),
    _curve(
        "M4 Pro",
        "published: 4 rows 1.5x, 8 rows 2.7x of one; further rows as dear as the last",
        _NARROW,
        r1=1.0, r4=1.5, r8=2.7,
    ),
    _curve(
        "M3 Ultra, older mlx",
        "published: 7 rows 5.3x of one; a straight line",
        _NARROW,
        r1=1.0, r7=5.3,
    ),
    _curve(
        "M1/M2 by reading",
        "MLX's source: up to one read of the weights per row to 5 rows, then a matrix kernel; that "
        "it costs 5 reads is assumed",
        (1, 2, 4, 8, 16, 32),
        r1=1.0, r5=5.0, r8=5.0, r16=5.0, r32=6.0,
    ),
    _curve(
        "M3/M4 by reading",
        "MLX's source: one read of the weights for 2 to 5 rows, two to 10, three to 15; nothing "
        "but reading the weights costs time",
        (1, 2, 4, 5, 8, 10, 16),
        r1=1.0, r5=1.0, r6=2.0, r10=2.0, r11=3.0, r15=3.0, r16=3.2,
    ),
    _curve(
        "M5 by reading",
        "MLX's source: as M3/M4 up to 10 rows, then a matrix kernel; that it costs 2 reads to 32 "
        "rows is assumed",
        (1, 2, 4, 5, 8, 10, 16, 32),
        r1=1.0, r5=1.0, r6=2.0, r10=2.0, r32=2.2,
    ),
    _curve(
        "MoE",
        "published: 8.5/13.5/15.6/20.7/28.1 ms at 1/2/3/5/8 rows; further rows as dear as the last",
        _NARROW,
        r1=8.5, r2=13.5, r3=15.6, r5=20.7, r8=28.1,
    ),
    _curve(
        "M4 Pro, 32k context",
        "M4 Pro's, and as much time again for attention at one row, which is assumed to double up "
        "to 8 rows; 8 to 12 rows cost it 2.5 times (published: 2.3 to 2.8)",
        _NARROW,
        r1=2.0, r4=1.5 + 1.43, r8=2.7 + 2.0, r12=3.9 + 5.0, r16=5.1 + 6.0,
    ),
)  # fmt: skip


class Text(Protocol):
    """A text to decode, and what is proposed on the way."""

    name: str
    drafts_cost: float
    length: int

    def begin(self) -> None:
        """Start at the first token."""

    def history(self, position: int) -> Sequence[int]:
        """All tokens before this one, as the controller may see them."""

    def propose(self, position: int, budget: int) -> tuple[tuple[str, int], list[int], bool]:
        """What is drafted here: source and evidence, tokens, whether the host knows them."""

    def token(self, position: int) -> int:
        """The token that the model says here."""


@dataclass
class LookupText:
    """A recorded answer, drafted by `PromptLookup` itself."""

    name: str
    prompt: list[int]
    answer: list[int]
    make_drafter: Callable[[], PromptLookup] = PromptLookup
    drafts_cost: float = 0.0

    def __post_init__(self) -> None:
        self.length = len(self.answer)
        self._tokens = self.prompt + self.answer

    def begin(self) -> None:
        """A fresh index."""
        self._drafter = self.make_drafter()

    def history(self, position: int) -> Sequence[int]:
        """Prompt and answer so far."""
        return self._tokens[: len(self.prompt) + position]

    def propose(self, position: int, budget: int) -> tuple[tuple[str, int], list[int], bool]:
        """The lookup's proposal."""
        tokens = self._drafter.propose(self.history(position), budget)
        return self._drafter.source, tokens, True

    def token(self, position: int) -> int:
        """Of the answer."""
        return self.answer[position]


@dataclass
class AgreementText:
    """A text of which is only known where a draft agrees with it.

    Attributes:
        name: Its name.
        agrees: Whether a draft of each position is right, those before it being right.
        drafts_cost: Of a drafted token, in plain steps.
        evidence: What the source says of the proposal at each position; None for a draft model.
    """

    name: str
    agrees: Sequence[bool]
    drafts_cost: float = 0.0
    evidence: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.length = len(self.agrees)

    def begin(self) -> None:
        """Nothing is remembered."""

    def history(self, position: int) -> Sequence[int]:
        """Ones, as all tokens are."""
        return [1] * position

    def propose(self, position: int, budget: int) -> tuple[tuple[str, int], list[int], bool]:
        """Ones where the draft agrees, else zeros."""
        tokens = [int(agrees) for agrees in self.agrees[position : position + budget]]
        if self.evidence is None:
            return ("model", 0), tokens, False
        return ("lookup", self.evidence[position]), tokens, True

    def token(self, position: int) -> int:
        """A one."""
        return 1


@dataclass(frozen=True)
class Run:
    """How a text went: time in the curve's unit, rounds, and rounds by the width of their tile."""

    seconds: float
    rounds: int
    widths: dict[int, int]


def decode(
    text: Text,
    curve: Curve,
    fixed: int | None = None,
    believed: TileCosts | None = None,
    catch_up: float = 0.0,
) -> Run:
    """Decode a text on the virtual clock.

    Args:
        text: What is decoded.
        curve: What tiles cost.
        fixed: Drafts per round; None leaves it to the adaptive count.
        believed: What the adaptive count is told that tiles cost; by default the truth.
        catch_up: What a draft model takes for a token that it has yet to take in, in plain steps,
            where those are more than a tile holds.
    """
    adaptive = None
    if fixed is None:
        adaptive = AdaptiveDraftCount(believed or curve.costs, curve.ladder[0])
    plain = curve.costs.of(curve.ladder[0])
    text.begin()
    position = rounds = seen = 0
    seconds = 0.0
    widths: dict[int, int] = {}
    source = ("lookup", 0) if text.drafts_cost == 0.0 else ("model", 0)
    while position < text.length:
        limit = min(curve.ladder[-1] - 1, text.length - position - 1)
        budget = limit if fixed is None else min(fixed, limit)
        if adaptive is not None:
            adaptive.begin(text.history(position), limit, curve.width_of)
            # A draft model knows what its own tokens take.
            known_cost = text.drafts_cost * plain or None
            behind = position - seen if position - seen > curve.ladder[-1] else 0
            behind_seconds = behind * catch_up * plain
            budget = adaptive.budget(source[0], known_cost, behind_seconds)
        source, tokens, known = text.propose(position, budget)
        draft_seconds = len(tokens) * text.drafts_cost * plain
        if adaptive is not None and tokens:
            draft_seconds += behind_seconds
            seen = position
        if adaptive is not None:
            tokens = tokens[
                : adaptive.keep(source, len(tokens), draft_seconds, tokens if known else None)
            ]
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == text.token(position + accepted):
            accepted += 1
        width = curve.width_of(len(tokens))
        tile = curve.costs.of(width)
        if adaptive is not None:
            adaptive.record(
                drafted=len(tokens),
                accepted=accepted,
                emitted=accepted + 1,
                width=width,
                seconds=tile,
            )
        seconds += draft_seconds + tile
        widths[width] = widths.get(width, 0) + 1
        position += accepted + 1
        rounds += 1
    return Run(seconds, rounds, widths)


def all_texts() -> list[Text]:
    """Whatever is decoded."""
    return [*recorded_texts(), *recorded_draft_texts(), *synthetic_texts()]


def recorded_texts() -> list[Text]:
    """The greedy answers of SmolLM2-135M to the five workloads, by lookup."""
    found = json.loads((TRACES / "smollm2.json").read_text())
    texts: list[Text] = []
    for name, trace in found["texts"].items():
        texts.append(LookupText(f"{name}, lookup", trace["prompt"], trace["answer"]))
    return texts


def recorded_draft_texts() -> list[AgreementText]:
    """The same answers by draft models: the model itself in few bits, and with layers left out.

    A drafted token costs as many plain steps as the draft's weights have of the model's bytes.
    One token's forward reads every weight once, and on the machines of most curves that is what
    it takes time for. The embedding is counted once, since it is the head as well, which reads
    all of it. Floats are counted with 16 bits, as models on those machines have: in float32, as
    the drafts were recorded, those in few bits would be little more than half as dear. Attention
    and the launches of the layers are not counted.
    """
    found = json.loads(DRAFT_TRACES.read_text())
    return [
        AgreementText(
            f"{name}, {draft}",
            [agrees == "1" for agrees in by_position],
            trace["bytes"] / found["bytes"],
        )
        for draft, trace in found["drafts"].items()
        for name, by_position in trace["agrees"].items()
    ]


def synthetic_texts(length: int = 400) -> list[Text]:
    """Drafts of steady and of hostile luck, by a lookup and by models of two prices."""
    chance = random.Random(8)
    luck: dict[str, list[bool]] = {
        f"right at {rate:.0%}": [chance.random() < rate for _ in range(length)]
        for rate in (0.3, 0.6, 0.8, 0.95)
    }
    luck |= {
        "always right": [True] * length,
        "always wrong": [False] * length,
        "flips every 50": [i // 50 % 2 == 0 for i in range(length)],
        "flips every 50, wrong first": [i // 50 % 2 == 1 for i in range(length)],
        "flips every 7": [i // 7 % 2 == 0 for i in range(length)],
        "right, then wrong": [i < length // 2 for i in range(length)],
        "wrong, then right": [i >= length // 2 for i in range(length)],
    }
    texts: list[Text] = []
    for name, agrees in luck.items():
        texts.append(AgreementText(f"{name}, lookup", agrees, 0.0, [8] * length))
        for price in (0.1, 0.25):
            texts.append(AgreementText(f"{name}, model at {price:g}", agrees, price))
    return texts


def compare(text: Text, curve: Curve) -> dict[str, Any]:
    """What the adaptive count gains on a text, beside plain and the best fixed count."""
    plain = text.length * curve.costs.of(curve.ladder[0])
    fixed = {count: decode(text, curve, count) for count in range(curve.ladder[-1])}
    best = min(fixed, key=lambda count: fixed[count].seconds)
    run = decode(text, curve)
    return {
        "text": text.name,
        "curve": curve.name,
        "tokens": text.length,
        "speed_up": plain / run.seconds,
        "best_fixed": best,
        "best_fixed_speed_up": plain / fixed[best].seconds,
        "of_best_fixed": fixed[best].seconds / run.seconds,
        "rounds": run.rounds,
        "widths": run.widths,
    }


def main() -> None:
    """Decode every text under every curve and write down what was seen."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "simulate", help="results without their ending"
    )
    arguments = parser.parse_args()
    found = [compare(text, curve) for curve in CURVES for text in all_texts()]
    below = [f for f in found if f["speed_up"] < FLOOR]
    far = [f for f in found if f["of_best_fixed"] < NEAR_BEST]
    report = provenance() | {
        "floor": FLOOR,
        "near_best": NEAR_BEST,
        "below_floor": len(below),
        "far_from_best": len(far),
        "recorded_drafts": {
            "runs": len(_of_recorded_drafts(found)),
            "below_floor": len(_of_recorded_drafts(below)),
            "far_from_best": len(_of_recorded_drafts(far)),
        },
        "curves": {c.name: {"rows": c.costs.seconds, "source": c.source} for c in CURVES},
        "runs": found,
    }
    text = _report(found, below, far)
    print(text)
    write_json(arguments.output.with_suffix(".json"), report)
    arguments.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def _of_recorded_drafts(runs: list[dict]) -> list[dict]:
    """Those of them whose text was drafted by a recorded draft model."""
    names = {text.name for text in recorded_draft_texts()}
    return [run for run in runs if run["text"] in names]


def _drafts_table(found: list[dict]) -> str:
    """The worst and the best text of every recorded draft model under every curve."""
    by_draft: dict[str, list[AgreementText]] = {}
    for text in recorded_draft_texts():
        by_draft.setdefault(text.name.rpartition(", ")[2], []).append(text)
    header = ["curve"]
    for draft, texts in by_draft.items():
        agrees = [right for text in texts for right in text.agrees]
        share = sum(agrees) / len(agrees)
        header.append(f"{draft}: {share:.0%} right at {texts[0].drafts_cost:.2f}")
    rows = []
    for curve in CURVES:
        row = [curve.name]
        for texts in by_draft.values():
            names = {text.name for text in texts}
            mine = [f for f in found if f["curve"] == curve.name and f["text"] in names]
            mine.sort(key=lambda f: f["speed_up"])
            row.append(f"{_gain(mine[0])} to {_gain(mine[-1])}")
        rows.append(row)
    return markdown_table(header, rows)


def _gain(run: dict) -> str:
    return f"{run['speed_up']:.2f}x ({run['best_fixed_speed_up']:.2f}x)"


def _report(found: list[dict], below: list[dict], far: list[dict]) -> str:
    recorded = [f for f in found if ", lookup" in f["text"] and f["tokens"] == 200]
    names = list(dict.fromkeys(f["text"].removesuffix(", lookup") for f in recorded))
    rows = []
    for curve in CURVES:
        mine = [f for f in recorded if f["curve"] == curve.name]
        cells = [_gain(f) for f in mine]
        hostile = [f for f in found if f["curve"] == curve.name and f not in mine]
        least = min(hostile, key=lambda f: f["speed_up"])
        rows.append([curve.name, *cells, f"{least['speed_up']:.3f}x"])
    parts = [
        "Speed against plain decoding on a virtual clock: the adaptive count, and in brackets the "
        "best fixed number of drafts, known with hindsight.",
        markdown_table(["curve", *names, "least of all others"], rows),
        "The same five texts by recorded draft models, the worst and the best of them; how many "
        "of a draft's tokens are right after right ones, and what one costs in plain steps:",
        _drafts_table(found),
        f"All runs: {len(found)}; below {FLOOR} of plain: {len(below)}; more than 5 % below the "
        f"best fixed number of drafts: {len(far)}. Of these, with recorded draft models: "
        f"{len(_of_recorded_drafts(found))}, {len(_of_recorded_drafts(below))} and "
        f"{len(_of_recorded_drafts(far))}.",
    ]
    # Those below the floor stand first.
    worst = sorted(below, key=lambda f: f["speed_up"])
    worst += sorted((f for f in far if f not in below), key=lambda f: f["of_best_fixed"])
    if worst:
        parts.append(
            markdown_table(
                ["curve", "text", "adaptive", "best fixed", "its drafts", "adaptive of best"],
                [
                    [
                        f["curve"],
                        f["text"],
                        f"{f['speed_up']:.3f}x",
                        f"{f['best_fixed_speed_up']:.3f}x",
                        f["best_fixed"],
                        f"{f['of_best_fixed']:.3f}",
                    ]
                    for f in worst
                ],
            )
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
