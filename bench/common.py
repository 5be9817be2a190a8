"""What every measurement says about itself: machine, versions, commit and spread."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Range:
    """Median and extremes of a sample."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(sample: Sequence[float]) -> Range:
        """Sum up a sample of at least one number."""
        return Range(statistics.median(sample), min(sample), max(sample))


def provenance() -> dict[str, Any]:
    """Where, when and by what a measurement was made, ready for JSON."""
    module = sys.modules["__main__"].__spec__.name
    # Of a file elsewhere the name is enough: where it lies is nobody's business.
    arguments = [Path(part).name if Path(part).is_absolute() else part for part in sys.argv[1:]]
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "architecture": platform.machine(),
            "device": str(mx.default_device()),
            # Processes that wanted a core in the last minute, this one included.
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "mlxspec", "numpy")}
        | {"python": platform.python_version()},
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a result file and say where it lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that reads well as text too: its columns are padded to one width."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _commit() -> str:
    """The commit measured, and whether the package differed from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "mlxspec", "kernels")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    """The processor's name as a person knows it."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
