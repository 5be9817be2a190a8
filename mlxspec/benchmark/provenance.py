"""What every result file says about itself: command, date, commit, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

_CHECKOUT = Path(__file__).resolve().parents[2]


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Where, when and by what a measurement was made, ready for JSON.

    Args:
        command: The words of the command; default: this process's own.
    """
    words = list(command) if command is not None else _own_command()
    return {
        "command": shlex.join(_without_folders(words)),
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
    """Write a result file and say so on stderr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


def _own_command() -> list[str]:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["python", "-m", spec.name] if spec else [Path(sys.argv[0]).name]
    return [*program, *sys.argv[1:]]


def _without_folders(words: Sequence[str]) -> list[str]:
    """Of a file elsewhere the name is enough: where it lies is nobody's business."""
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def _commit() -> str:
    """The commit measured and whether the package differed from it, or that it was installed."""
    if not (_CHECKOUT / ".git").exists():
        return "installed, no checkout"
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "mlxspec", "kernels")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    return _output(["git", "-C", str(_CHECKOUT), *arguments])


def _processor() -> str:
    """The processor's name as a person knows it."""
    if platform.system() == "Darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
