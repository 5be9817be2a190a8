"""The picture of a comparison, drawn again from its JSON.

    python -m bench.compare_plot bench/results/compare-f32-openblas.json

draws bench/results/compare-f32-openblas.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxspec.benchmark.history import read_result
from mlxspec.benchmark.plot import plot


def main() -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_plot", description=__doc__.splitlines()[0]
    )
    parser.add_argument("json", type=Path)
    file = parser.parse_args().json
    plot(read_result(file), file.with_suffix(".png"))


if __name__ == "__main__":
    main()
