"""Measurements of a device and a model that are made once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.cache_dir import cache_dir
from mlxspec.whole_files import replacing

# Raised when another measurement is made, so that an old answer is not taken for the new one.
_MEASUREMENT = 5
# Environment variables that choose kernels, or how many threads run them.
_KERNEL_CHOICES = (
    "MLX_SDPA_BLOCKS",
    "MLX_METAL_FAST_SYNCH",
    "LD_PRELOAD",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

T = TypeVar("T")


def remembered(circumstances: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T | None:
    """What was measured before in these circumstances; None if nothing was, or is not readable.

    Args:
        circumstances: From `measured_in`.
        read: Makes the measurement of what was stored.
    """
    try:
        stored = json.loads(_file_for(circumstances).read_text())
        # What tuples become in a file.
        expected = json.loads(json.dumps(circumstances))
        return read(stored) if stored == stored | expected else None
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None


def remember(circumstances: dict[str, Any], measurement: dict[str, Any]) -> None:
    """Keep a measurement; where the cache cannot be written it is measured again next time."""
    file = _file_for(circumstances)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as scratch:
            scratch.write_text(json.dumps(measurement | circumstances))
    except OSError:
        return


def measured_in(model: nn.Module, **engine: Any) -> dict[str, Any]:
    """All that decides which kernels run, and so what a measurement is worth.

    Args:
        model: Its class, arguments, and the shapes and dtypes of its weights count.
        **engine: How the engine runs it: widths, placement, span step; JSON values.
    """
    flat: Any = tree_flatten(model.parameters())
    shapes = "".join(f"{name}{array.shape}{array.dtype}" for name, array in flat)
    kinds = "".join(f"{name}{type(module).__name__}" for name, module in model.named_modules())
    structure = f"{getattr(model, 'args', '')!r}{shapes}{kinds}"
    return {
        "measurement": _MEASUREMENT,
        "engine": engine,
        "model": type(model).__module__,
        "structure": hashlib.sha256(structure.encode()).hexdigest(),
        "mlx": version("mlx"),
        "device": str(mx.default_device()),
        "hardware": str(mx.device_info().get("device_name", "")),
        "system": [platform.system(), platform.release(), platform.machine()],
        "environment": {name: os.environ.get(name, "") for name in _KERNEL_CHOICES},
    }


def _file_for(circumstances: dict[str, Any]) -> Path:
    key = json.dumps(circumstances, sort_keys=True).encode()
    return cache_dir() / "widths" / f"{hashlib.sha256(key).hexdigest()[:32]}.json"
