"""Which tile widths compute the same bits on this device, measured and remembered.

Kernels are chosen by the number of rows, and another kernel may round another way. A text can only
be the same with and without drafts if every width it meets computes a row alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxspec.cache_dir import cache_dir
from mlxspec.engine.protocol import Capture, SpeculativeEngine

# Environment variables that choose kernels.
_KERNEL_CHOICES = ("MLX_SDPA_BLOCKS", "MLX_METAL_FAST_SYNCH", "LD_PRELOAD", "OPENBLAS_CORETYPE")


def width_classes(engine: SpeculativeEngine, widths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Groups of widths whose rows are equal bit for bit, by one tile of each from position 0.

    Row i of every tile computes the same token at the same position, so only the width differs.

    Args:
        engine: A fresh engine whose ladder has these widths; it is emptied afterwards.
        widths: Ascending.

    Returns:
        The groups, each ascending; a width stands in the first group that it is equal to.
    """
    tokens = [(37 * i + 11) % engine.vocab_size for i in range(widths[-1])]
    rows: dict[int, mx.array] = {}
    for width in widths:
        engine.reset(0)
        logits = engine.verify(tokens[:width], Capture(logits=True)).logits
        assert logits is not None
        rows[width] = logits
    engine.reset(0)
    classes: list[list[int]] = []
    for width in widths:
        for group in classes:
            common = min(width, group[-1])
            if mx.array_equal(rows[width][:common], rows[group[-1]][:common], equal_nan=True):
                group.append(width)
                break
        else:
            classes.append([width])
    return [tuple(group) for group in classes]


def best_class(classes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The group to decode in: the one with most widths, of several the one that reaches widest."""
    return max(classes, key=lambda group: (len(group), group[-1]))


def remembered_classes(model: nn.Module, widths: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """What was measured before for this device, model and MLX; None if nothing was."""
    try:
        stored = json.loads(_file_for(model, widths).read_text())
        return [tuple(int(width) for width in group) for group in stored["classes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_classes(
    model: nn.Module, widths: tuple[int, ...], classes: list[tuple[int, ...]]
) -> None:
    """Keep a measurement; where the cache cannot be written it is measured again next time."""
    file = _file_for(model, widths)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"classes": classes} | _circumstances(model, widths)))
        scratch.replace(file)
    except OSError:
        return


def _file_for(model: nn.Module, widths: tuple[int, ...]) -> Path:
    key = json.dumps(_circumstances(model, widths), sort_keys=True).encode()
    return cache_dir() / "widths" / f"{hashlib.sha256(key).hexdigest()[:32]}.json"


def _circumstances(model: nn.Module, widths: tuple[int, ...]) -> dict[str, Any]:
    """All that decides which kernels run."""
    flat: Any = tree_flatten(model.parameters())
    shapes = "".join(f"{name}{array.shape}{array.dtype}" for name, array in flat)
    return {
        "widths": list(widths),
        "model": type(model).__module__,
        "weights": hashlib.sha256(shapes.encode()).hexdigest(),
        "mlx": version("mlx"),
        "device": str(mx.default_device()),
        "hardware": str(mx.device_info().get("device_name", "")),
        "system": [platform.system(), platform.release(), platform.machine()],
        "environment": {name: os.environ.get(name, "") for name in _KERNEL_CHOICES},
    }
