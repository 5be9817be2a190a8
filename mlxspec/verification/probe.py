"""What an engine measures of a device and a model: costs and classes of tile widths."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.engine import StaticShapeEngine


@dataclass(frozen=True)
class Probe:
    """What the engine that `mlxspec generate` would use has found out.

    Attributes:
        device: What MLX calls the device.
        milliseconds: Of a tile in a short context, by its rows.
        classes: Groups of widths whose rows are equal bit for bit; None where nothing was
            compared, as the widths were named or there is one.
        widths: Those that are decoded in.
        remembered: Of "tile costs" and "width classes", whether they were known from an earlier
            run; what was not has been measured now.
        note: What the engine has to say about itself, or None.
        regimes: The same where the context meets other kernels: from how many keys on, whether
            they are quantised, milliseconds by rows, and classes.
    """

    device: str
    milliseconds: dict[int, float]
    classes: list[tuple[int, ...]] | None
    widths: tuple[int, ...]
    remembered: dict[str, bool]
    note: str | None
    regimes: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            f"  {width:>4}  {ms:>9.2f}  {ms / width:>9.2f}  {ms / self._first:>9.2f}"
            f"{'' if width in self.widths else '  not decoded in'}"
            for width, ms in self.milliseconds.items()
        ]
        lines = [
            f"{self.device}",
            f"  {'rows':>4}  {'ms a tile':>9}  {'ms a row':>9}  {'of 1st':>9}",
            *rows,
            f"Decoded in: {_listed(self.widths)}",
        ]
        if self.classes is not None:
            groups = " | ".join(map(_listed, self.classes))
            lines.append(f"Tile widths whose rows are equal bit for bit: {groups}")
        for regime in self.regimes:
            costs = ", ".join(f"{width}: {ms:.2f}" for width, ms in regime["milliseconds"].items())
            groups = " | ".join(map(_listed, regime["classes"]))
            kind = "quantised keys" if regime["quantized"] else "keys"
            when = "remembered" if regime["remembered"] else "measured now"
            lines.append(f"From {regime['keys']} {kind} on ({when}): ms a tile {costs}")
            lines.append(f"  equal bit for bit: {groups}")
        for what, known in self.remembered.items():
            known_from = "remembered from an earlier run" if known else "measured now"
            lines.append(f"The {what} were {known_from}")
        if self.note:
            lines.append(f"Engine: {self.note}")
        return "\n".join(lines)

    @property
    def _first(self) -> float:
        return next(iter(self.milliseconds.values()))


def probe_model(model: nn.Module, **engine_options: Any) -> Probe:
    """Measure a model, or recall what was measured in the same circumstances.

    Args:
        model: A model of mlx-lm that the static engine takes.
        **engine_options: See `StaticShapeEngine`.
    """
    engine = StaticShapeEngine(model, **engine_options).widened()
    costs = engine.tile_costs
    return Probe(
        device=str(mx.default_device()),
        milliseconds={width: seconds * 1e3 for width, seconds in costs.seconds},
        classes=engine.width_classes,
        widths=engine.tile_widths,
        remembered=dict(engine.remembered),
        note=engine.note,
        regimes=tuple(
            {
                "keys": each.regime.keys,
                "quantized": each.regime.quantized,
                "milliseconds": {width: 1e3 * seconds for width, seconds in each.costs.seconds},
                "classes": each.classes,
                "remembered": each.remembered,
            }
            for each in engine.measured()
            if each.position
        ),
    )


def _listed(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))
