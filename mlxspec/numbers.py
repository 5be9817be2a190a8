"""Numbers: those from callers are taken in any kind and checked, those for people get a noun."""

from __future__ import annotations

import math
import operator
from typing import Any

# Below it, logits that are divided by it overflow.
LEAST_TEMPERATURE = 1e-5


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """A whole number of Python, NumPy or MLX as an `int`.

    Raises:
        ValueError: It is no whole number, or lies outside the range.
    """
    end = f"from {least} on" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        number = None
    if (
        number is None
        or isinstance(value, bool)
        or number < least
        or (most is not None and number > most)
    ):
        raise ValueError(f"{name}: expected a whole number {end}, got {value!r}")
    return number


def real_number(name: str, value: Any, least: float, most: float) -> float:
    """A finite number of Python, NumPy or MLX as a `float`.

    Raises:
        ValueError: It is no number, not finite, or lies outside the range.
    """
    end = f"from {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool | str) or not math.isfinite(number) or not least <= number <= most:
        raise ValueError(f"{name}: expected a number {end}, got {value!r}")
    return number


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "1 token" and "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
