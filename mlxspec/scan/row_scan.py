"""`LogitRowScan`: one scan for every caller, and the choice of the form that runs it."""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from mlxspec.scan import metal_form, mlx_form

FORMS = ("metal", "mlx")
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class RowScan(NamedTuple):
    """What the scan found in each row of logits. Every field is lazy.

    A named tuple, because `mx.compile` takes tuples of arrays apart and dataclasses not. In the
    MLX form each field is a graph of its own, so one that is not used costs nothing; in the Metal
    form all of them come from the same read of the logits.

    Attributes:
        argmax: [rows] uint32, index of the first maximum; 0 for a row of NaN and -inf only.
        maximum: [rows] float32, the value there, after the soft cap.
        logsumexp: [rows] float32, over the capped row without its NaNs.
        nan_count: [rows] uint32. A row with `nan_count == vocab` holds no number at all.
        top_values: [rows, k] float32 by (value descending, index ascending), or None.
        top_indices: [rows, k] uint32, where those values stand, or None.
        agreement: [4] uint32, the fields of `Agreement`, or None without a draft.
    """

    argmax: mx.array
    maximum: mx.array
    logsumexp: mx.array
    nan_count: mx.array
    top_values: mx.array | None
    top_indices: mx.array | None
    agreement: mx.array | None = None


class Agreement(NamedTuple):
    """What a round reads back: `Agreement(*scan.agreement.tolist())`.

    Attributes:
        accepted: How many draft tokens in a row the model confirms.
        next_token: The model's own token after them.
        nan_count: NaNs in the rows the round uses, first_row .. first_row + accepted.
        empty_row: The first of those rows that holds no number, or the number of rows.
    """

    accepted: int
    next_token: int
    nan_count: int
    empty_row: int


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
            form: "metal" or "mlx"; None takes the Metal kernels where MLX's default device is a
                Metal GPU and MLX's own operations elsewhere.

        Raises:
            ValueError: The cap is not a positive number, `top_k` is negative, or there is no such
                form.
        """
        if cap is not None and not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"cap must be a positive number or None, got {cap!r}.")
        if top_k < 0:
            raise ValueError(f"top_k must be 0 (no list) or more, got {top_k}.")
        if form is not None and form not in FORMS:
            raise ValueError(f"form must be one of {FORMS} or None (automatic), got {form!r}.")
        self.cap = cap
        self.top_k = top_k
        self.form = form

    def __call__(
        self,
        logits: mx.array,
        draft: mx.array | None = None,
        first_row: mx.array | None = None,
    ) -> RowScan:
        """Scan every row and, given a draft, count how much of it the rows confirm.

        Args:
            logits: [rows, vocab]; float32, float16 or bfloat16; not capped if `cap` was given.
            draft: [rows] int32: the token guessed to follow each row, negative where there is
                none. The last row's is not looked at: no row could follow it.
            first_row: [1] uint32, the row where the block starts; row 0 by default.

        Returns:
            The scan of the rows.

        Raises:
            ValueError: The logits are not two-dimensional, are empty, or have another dtype; the
                draft does not have one token a row; `first_row` comes without a draft.
        """
        check_logits(logits)
        if draft is None and first_row is not None:
            raise ValueError("first_row says where a draft starts; pass the draft too.")
        if draft is not None:
            if draft.shape != (logits.shape[0],):
                raise ValueError(
                    f"draft must hold one token a row, {(logits.shape[0],)}, got {draft.shape}."
                )
            first_row = mx.array([0], mx.uint32) if first_row is None else first_row
        top_k = min(self.top_k, logits.shape[1])
        if (self.form or automatic_form()) == "metal":
            return self._metal(logits, top_k, draft, first_row)
        return self._mlx(logits, top_k, draft, first_row)

    def _metal(
        self, logits: mx.array, top_k: int, draft: mx.array | None, first_row: mx.array | None
    ) -> RowScan:
        in_kernel = top_k <= metal_form.MAX_TOP_K
        scan = metal_form.scan_rows(
            logits,
            cap=self.cap,
            top_k=top_k if in_kernel else 0,
            draft=draft,
            first_row=first_row,
        )
        top_values, top_indices = scan.top_values, scan.top_indices
        if not in_kernel:
            top_values, top_indices = self._list(self._capped(logits), top_k)
        return RowScan(
            argmax=scan.argmax,
            maximum=scan.maximum,
            logsumexp=scan.logsumexp,
            nan_count=scan.nan_count,
            top_values=top_values,
            top_indices=top_indices,
            agreement=scan.agreement,
        )

    def _mlx(
        self, logits: mx.array, top_k: int, draft: mx.array | None, first_row: mx.array | None
    ) -> RowScan:
        values = self._capped(logits)
        argmax = mlx_form.first_maximum(values)
        nan_count = mlx_form.count_nan(values)
        top_values, top_indices = self._list(values, top_k)
        return RowScan(
            argmax=argmax,
            maximum=mlx_form.value_at(values, argmax[:, None])[:, 0],
            logsumexp=mlx_form.row_logsumexp(values),
            nan_count=nan_count,
            top_values=top_values,
            top_indices=top_indices,
            agreement=None
            if draft is None or first_row is None
            else mlx_form.agreement(argmax, nan_count, logits.shape[1], draft, first_row),
        )

    def _capped(self, logits: mx.array) -> mx.array:
        return logits if self.cap is None else mlx_form.soft_cap(logits, self.cap)

    @staticmethod
    def _list(values: mx.array, top_k: int) -> tuple[mx.array | None, mx.array | None]:
        if not top_k:
            return None, None
        indices = mlx_form.largest(values, top_k)
        return mlx_form.value_at(values, indices), indices


def check_logits(logits: mx.array) -> None:
    """Raise a ValueError unless logits are [rows, vocab] of a floating dtype and not empty."""
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits must be [rows, vocab] and not empty, got {logits.shape}.")
    if logits.dtype not in _DTYPES:
        raise ValueError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}.")


def automatic_form() -> str:
    """Say which form MLX's default device takes: "metal" on a Metal GPU, "mlx" elsewhere."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return "metal" if on_gpu and mx.metal.is_available() else "mlx"
