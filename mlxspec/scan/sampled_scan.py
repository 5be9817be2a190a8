"""`SampledRowScan`: the seeded choice of a token in each row, with the noise drawn on the way."""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from mlxspec.scan import metal_form, mlx_form
from mlxspec.scan.row_scan import FORMS, automatic_form, check_logits


class SampledScan(NamedTuple):
    """What a sampled scan chose.

    Attributes:
        token: [rows] uint32, argmax of logits / temperature + noise.
        nan_count: [rows] uint32, NaNs of the logits; a row of `vocab` of them holds no number.
    """

    token: mx.array
    nan_count: mx.array


class SampledRowScan:
    """Chooses `argmax(logits / temperature + Gumbel noise)` in each row.

    The noise of a row is a function of its key and the index: whoever makes the key from seed,
    position and purpose gets the same choice in whichever row or tile a position is scored. Rows
    may be logits or filtered log-probabilities (-inf for what a filter took away). The rules for
    NaN, soft cap and ties are `LogitRowScan`'s.
    """

    def __init__(
        self, temperature: float, cap: float | None = None, form: str | None = None
    ) -> None:
        """Choose how to sample.

        Args:
            temperature: Above 0; greedy choices are `LogitRowScan`'s.
            cap: The model's final soft cap, or None.
            form: "metal" or "mlx"; None picks as `LogitRowScan` does.

        Raises:
            ValueError: The temperature or the cap is not a positive number, or there is no such
                form.
        """
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a positive number, got {temperature!r}.")
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"cap must be a positive number or None, got {cap!r}.")
        if form is not None and form not in FORMS:
            raise ValueError(f"form must be one of {FORMS} or None (automatic), got {form!r}.")
        self.temperature = temperature
        self.cap = cap
        self.form = form

    def __call__(self, logits: mx.array, keys: mx.array) -> SampledScan:
        """Choose a token in every row.

        Args:
            logits: [rows, vocab]; float32, float16 or bfloat16.
            keys: [rows, 2] uint32.

        Returns:
            The choices.

        Raises:
            ValueError: The logits or the keys have another shape or dtype.
        """
        check_logits(logits)
        if keys.shape != (logits.shape[0], 2) or keys.dtype != mx.uint32:
            raise ValueError(
                f"keys must be {(logits.shape[0], 2)} uint32, got {keys.shape} {keys.dtype}."
            )
        if (self.form or automatic_form()) == "metal":
            scan = metal_form.sample_rows(logits, keys, self.temperature, cap=self.cap)
            return SampledScan(token=scan.argmax, nan_count=scan.nan_count)
        values = logits if self.cap is None else mlx_form.soft_cap(logits, self.cap)
        noisy = mlx_form.noisy(values, keys, self.temperature)
        return SampledScan(
            token=mlx_form.first_maximum(noisy), nan_count=mlx_form.count_nan(values)
        )
