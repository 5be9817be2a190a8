"""The picture of a result: speed-up and tokens per forward by workload, drafts over time.

Needs matplotlib (`pip install 'mlxspec[bench]'`), which nothing else of the package does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mlxspec.benchmark.comparison import BASELINE

# Okabe and Ito's palette, which colour-blind readers can tell apart; grey is mlx-lm.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#CC79A7", "#E69F00", "#F0E442")
_GREY = "#999999"
_TITLES = {"code_edit": "code edit", "json_copy": "JSON copy", "passage": "passage answer"}
_LONGEST_TITLE = 18


def plot(report: Mapping[str, Any], file: Path) -> None:
    """Draw a result of `mlxspec benchmark` as a PNG.

    Args:
        report: As written to JSON.
        file: Where to.
    """
    workloads = report["workloads"]
    contenders = list(
        dict.fromkeys(name for found in workloads.values() for name in found["contenders"])
    )
    colours = _colours(contenders)
    others = [name for name in contenders if name != BASELINE]
    drafting = [
        (workload, name, figures)
        for workload, found in workloads.items()
        for name, figures in found["contenders"].items()
        if figures.get("drafts")
    ]
    # One small picture of drafts per workload, under the two of bars.
    drafted = list(dict.fromkeys(workload for workload, _, _ in drafting))
    columns = min(3, max(1, len(drafted)))
    lower = math.ceil(len(drafted) / columns)
    width = max(9.0, 2.5 + 1.6 * len(workloads) + 0.25 * len(workloads) * len(others))
    figure = pyplot.figure(figsize=(width, 6.6 + 2.1 * lower), layout="constrained")
    heights = [6.6, 2.1 * lower] if lower else [6.6]
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).ravel()
    bars = parts[0]
    upper, middle = bars.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _speed_ups(upper, workloads, others, colours)
    _tokens_per_forward(middle, workloads, others, colours)
    # Above the bars, where it hides none.
    legend = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 1 + len(others)}
    upper.legend(frameon=False, fontsize=9, **legend)
    figure.suptitle(_caption(report), fontsize=9)
    if lower:
        axes = parts[1].subplots(lower, columns, squeeze=False, sharey=True).ravel()
        for place, workload in zip(axes, drafted, strict=False):
            _drafts(place, workload, drafting, colours)
        for place in axes[len(drafted) :]:
            place.axis("off")
        for row in range(lower):
            axes[row * columns].set_ylabel("draft length")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _colours(contenders: list[str]) -> dict[str, str]:
    ours = [name for name in contenders if not name.startswith("mlx-lm")]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(ours)}
    return dict.fromkeys(contenders, _GREY) | colours


def _speed_ups(
    axes: Axes, workloads: Mapping[str, Any], names: list[str], colours: Mapping[str, str]
) -> None:
    """Bars are medians of the repeats, whiskers their range."""

    def gains(name: str) -> list[Mapping[str, float] | None]:
        found = (entry["contenders"].get(name) for entry in workloads.values())
        return [None if figures is None else figures["speed_up"] for figures in found]

    for name, places, width in _groups(names, len(workloads)):
        known = [(x, g) for x, g in zip(places, gains(name), strict=True) if g is not None]
        medians = [gain["median"] for _, gain in known]
        at = [place for place, _ in known]
        axes.bar(at, medians, width, label=name, color=colours[name])
        below = [gain["median"] - gain["least"] for _, gain in known]
        above = [gain["most"] - gain["median"] for _, gain in known]
        axes.errorbar(
            at,
            medians,
            [below, above],
            fmt="none",
            ecolor="black",
            elinewidth=1,
            capsize=2,
        )
        for place, gain in known:
            # At the foot of its bar, where no whisker is.
            _number(axes, place, 0, f"{gain['median']:.2f}", color="white")
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label=BASELINE)
    axes.set_ylabel(f"speed, {BASELINE} = 1")
    _tidy(axes)


def _tokens_per_forward(
    axes: Axes, workloads: Mapping[str, Any], names: list[str], colours: Mapping[str, str]
) -> None:
    for name, places, width in _groups(names, len(workloads)):
        for place, entry in zip(places, workloads.values(), strict=True):
            if figures := entry["contenders"].get(name):
                height = figures["tokens_per_forward"]
                axes.bar(place, height, width, color=colours[name])
                _number(axes, place, height, f"{height:.1f}")
    axes.set_xticks(range(len(workloads)), [_title(name) for name in workloads])
    axes.set_ylabel("tokens per forward")
    _tidy(axes)


def _drafts(
    axes: Axes, workload: str, drafting: list[tuple[str, str, Any]], colours: Mapping[str, str]
) -> None:
    """A dot for every round of the last repeat: when it was, and how many tokens it drafted."""
    for where, name, figures in drafting:
        if where == workload:
            at, lengths = zip(*figures["drafts"], strict=True)
            axes.plot(at, lengths, ".", markersize=5, color=colours[name], alpha=0.8)
            axes.set_xlim(-0.02 * figures["tokens"], figures["tokens"])
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_title(_title(workload), fontsize=9)
    axes.set_xlabel("tokens emitted", fontsize=9)
    axes.set_ylim(bottom=-0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _groups(names: list[str], count: int) -> list[tuple[str, list[float], float]]:
    """Each name with the places of its bars, and the bars' width."""
    step = 0.84 / max(1, len(names))
    return [
        (name, [place + (i - (len(names) - 1) / 2) * step for place in range(count)], 0.92 * step)
        for i, name in enumerate(names)
    ]


def _number(axes: Axes, x: float, y: float, text: str, color: str = "black") -> None:
    axes.annotate(
        text, (x, y), (0, 3), textcoords="offset points", ha="center", fontsize=7, color=color
    )


def _tidy(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _title(workload: str) -> str:
    title = _TITLES.get(workload, workload)
    return title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…"


def _caption(report: Mapping[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    setting = f", setting {report['setting']}" if "setting" in report else ""
    repeats = report["repeats"]
    runs = f"{repeats} runs each: bar median, whisker range" if repeats > 1 else "1 run each"
    return (
        f"{report['model']}{setting}, {runs}\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['device']}; "
        f"mlxspec {versions['mlxspec']}, mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}"
    )
