"""The picture of a comparison: speed-up over mlx-lm plain per workload, with its spread.

    python -m bench.compare_plot bench/results/compare-f32-openblas.json

draws bench/results/compare-f32-openblas.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

BASELINE = "mlx-lm plain"
# The Okabe-Ito palette, which colour-blind readers can tell apart.
_COLOURS = {
    "mlx-lm speculative": "#999999",
    "mlxspec plain": "#56B4E9",
    "mlxspec lookup": "#0072B2",
    "mlxspec plain, exact": "#F5C77E",
    "mlxspec lookup, exact": "#D55E00",
}
_TITLES = {"code_edit": "code edit", "json_copy": "JSON copy", "passage": "passage answer"}


def main() -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_plot", description=__doc__.splitlines()[0]
    )
    parser.add_argument("json", type=Path)
    file = parser.parse_args().json
    plot(json.loads(file.read_text()), file.with_suffix(".png"))


def plot(report: dict[str, Any], file: Path) -> None:
    """Draw the report of `bench.compare_mlx_lm`.

    A bar is the median of the repeats, its whisker their range, the number on it how many tokens
    one forward of the model brought.
    """
    workloads = report["workloads"]
    names = [name for name in next(iter(workloads.values()))["contenders"] if name != BASELINE]
    figure, axes = pyplot.subplots(figsize=(1.5 + 2.1 * len(workloads), 5), layout="constrained")
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        figures = [found["contenders"][name] for found in workloads.values()]
        gains = [entry["speed_up"] for entry in figures]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(workloads))]
        medians = [gain["median"] for gain in gains]
        axes.bar(places, medians, 0.92 * width, label=name, color=_COLOURS[name])
        axes.errorbar(
            places,
            medians,
            [
                [gain["median"] - gain["least"] for gain in gains],
                [gain["most"] - gain["median"] for gain in gains],
            ],
            fmt="none",
            ecolor="black",
            elinewidth=1,
            capsize=2,
        )
        for place, gain, entry in zip(places, gains, figures, strict=True):
            axes.annotate(
                f"{entry['tokens_per_forward']:.1f}",
                (place, gain["most"]),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label=BASELINE)
    axes.set_xticks(range(len(workloads)), [_TITLES.get(name, name) for name in workloads])
    axes.set_ylabel(f"tokens per second, {BASELINE} = 1")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    machine = report["machine"]
    axes.set_title(
        f"{report['model']}, setting {report['setting']}\n"
        f"{machine['processor']}, {machine['cores']} cores; mlx {report['versions']['mlx']}, "
        f"mlx-lm {report['versions']['mlx-lm']}; {report['repeats']} repeats, bar: median, "
        "whisker: range, number: tokens per forward",
        fontsize=9,
    )
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
