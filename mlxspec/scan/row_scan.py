"""`LogitRowScan`: one scan for every caller, and the choice of the form that runs it."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import mlx.core as mx

from mlxspec.scan import mlx_form

Form = Literal["mlx"]
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class RowScan(NamedTuple):
    """What the scan found in each row of logits. Every field is lazy: unused, it costs nothing.

    A named tuple, because `mx.compile` takes tuples of arrays apart and dataclasses not.

    Attributes:
        argmax: [rows] uint32, index of the first maximum; 0 for a row of NaN and -inf only.
        maximum: [rows] float32, the value there, after the soft cap.
        logsumexp: [rows] float32, over the capped row without its NaNs.
        nan_count: [rows] uint32. A row with `nan_count == vocab` holds no number at all.
        top_values: [rows, k] float32 by (value descending, index ascending), or None.
        top_indices: [rows, k] uint32, where those values stand, or None.
    """

    argmax: mx.array
    maximum: mx.array
    logsumexp: mx.array
    nan_count: mx.array
    top_values: mx.array | None
    top_indices: mx.array | None


class LogitRowScan:
    """Finds the first maximum, log-sum-exp, NaN count and largest entries of rows of logits.

    NaN counts as -inf; the soft cap comes first and is rounded as the model rounds it; the first
    of equal maxima wins. May be called inside a function under `mx.compile`.
    """

    def __init__(self, cap: float | None = None, top_k: int = 0, form: str | None = None) -> None:
        """Choose what to scan for.

        Args:
            cap: The model's final soft cap `cap * tanh(x / cap)`; None where it has none, or where
                the logits are capped already.
            top_k: How many of the largest entries to list; a shorter row lists all it has.
            form: "mlx" to force that form; None picks the best one for MLX's default device.

        Raises:
            ValueError: The cap is not a positive number, `top_k` is negative, or there is no such
                form.
        """
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"cap must be a positive number or None, got {cap!r}.")
        if top_k < 0:
            raise ValueError(f"top_k must be 0 (no list) or more, got {top_k}.")
        if form not in (None, "mlx"):
            raise ValueError(f"form must be 'mlx' or None (automatic), got {form!r}.")
        self.cap = cap
        self.top_k = top_k
        self.form = form

    def __call__(self, logits: mx.array) -> RowScan:
        """Scan every row.

        Args:
            logits: [rows, vocab]; float32, float16 or bfloat16; not capped if `cap` was given.

        Returns:
            The scan of the rows.

        Raises:
            ValueError: The logits are not two-dimensional, are empty, or have another dtype.
        """
        if logits.ndim != 2 or 0 in logits.shape:
            raise ValueError(f"logits must be [rows, vocab] and not empty, got {logits.shape}.")
        if logits.dtype not in _DTYPES:
            raise ValueError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}.")

        values = logits if self.cap is None else mlx_form.soft_cap(logits, self.cap)
        argmax = mlx_form.first_maximum(values)
        top_values = top_indices = None
        if self.top_k:
            top_indices = mlx_form.largest(values, min(self.top_k, logits.shape[-1]))
            top_values = mlx_form.value_at(values, top_indices)
        return RowScan(
            argmax=argmax,
            maximum=mlx_form.value_at(values, argmax[:, None])[:, 0],
            logsumexp=mlx_form.row_logsumexp(values),
            nan_count=mlx_form.count_nan(values),
            top_values=top_values,
            top_indices=top_indices,
        )
