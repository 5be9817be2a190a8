"""Compares the scan with its reference on the machine at hand, and says what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxspec.scan import mlx_form
from mlxspec.scan.reference import (
    DtypeName,
    ReferenceScan,
    reference_gumbel,
    reference_scan,
    round_to,
)
from mlxspec.scan.row_scan import Agreement, LogitRowScan, RowScan, automatic_form
from mlxspec.scan.sampled_scan import SampledRowScan, SampledScan

DTYPES: dict[DtypeName, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
}
LOGSUMEXP_TOLERANCE = 2e-6

_TIES = [0.0, -0.0, 1.0, 1.0, -1.0]
_SPECIALS = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, -1e-41, 6e-8, 3.3e38, -3.3e38]


@dataclass(frozen=True)
class KernelVerdict:
    """What `check_kernels` found.

    Attributes:
        form: "metal" or "mlx", the form that was checked.
        device: What MLX calls the device.
        mlx_version: The MLX that ran it.
        cases: How many launches were compared.
        failures: One line per difference, the case first; empty if all is well.
    """

    form: str
    device: str
    mlx_version: str
    cases: int
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every case gave what the reference gives."""
        return not self.failures

    def __str__(self) -> str:
        what = "Metal kernels" if self.form == "metal" else "MLX form (no Metal GPU here)"
        where = f"{self.device}, mlx {self.mlx_version}"
        if self.passed:
            return f"Scan, {what}: all {self.cases} cases equal the reference ({where})."
        lines = [f"Scan, {what}: {len(self.failures)} differences in {self.cases} cases ({where})."]
        return "\n  ".join([*lines, *self.failures])


def hard_rows(
    kind: str, rows: int, vocab: int, dtype: DtypeName, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Make rows of logits that a scan can get wrong.

    Args:
        kind: One of `ROW_KINDS`.
        rows: How many.
        vocab: How wide.
        dtype: The format every entry is exact in.
        rng: Where the chance comes from.

    Returns:
        [rows, vocab] float32.
    """
    return round_to(ROW_KINDS[kind](rows, vocab, rng), dtype)


def _scattered_nan(rows: int, vocab: int, rng: np.random.Generator) -> NDArray[np.float64]:
    values = rng.normal(size=(rows, vocab)) * 8
    values[rng.random((rows, vocab)) < 0.3] = np.nan
    values[0, 0] = np.nan
    values[-1] = np.nan
    return values


ROW_KINDS: dict[str, Callable[[int, int, np.random.Generator], NDArray[np.float64]]] = {
    "model-like": lambda r, v, rng: rng.normal(size=(r, v)) * 4,
    "ties": lambda r, v, rng: rng.choice(_TIES, size=(r, v)),
    "saturated": lambda r, v, rng: rng.normal(size=(r, v)) * 300,
    "scattered NaN": _scattered_nan,
    "specials": lambda r, v, rng: rng.choice(_SPECIALS, size=(r, v)),
    "all -inf": lambda r, v, rng: np.full((r, v), -np.inf),
    "all NaN": lambda r, v, rng: np.full((r, v), np.nan),
    "denormals": lambda r, v, rng: rng.choice([1e-41, 2e-41, -1e-41, 1e-7, 0.0], size=(r, v)),
    "last is largest": lambda r, v, rng: np.arange(r * v, dtype=np.float64).reshape(r, v),
}


def differences(scan: RowScan, expected: ReferenceScan) -> list[str]:
    """Compare a scan with the reference's: equality, and a tolerance for the log-sum-exp alone.

    Args:
        scan: The scan under test.
        expected: What the reference makes of the same rows; as long a list as the scan's.

    Returns:
        One line per field that differs.
    """
    found = []
    fields: list[tuple[str, mx.array, NDArray]] = [
        ("argmax", scan.argmax, expected.argmax),
        ("maximum", scan.maximum, expected.maximum),
        ("nan_count", scan.nan_count, expected.nan_count),
    ]
    if scan.top_values is not None and scan.top_indices is not None:
        fields.append(("top_values", scan.top_values, expected.top_values))
        fields.append(("top_indices", scan.top_indices, expected.top_indices))
    for name, actual, right in fields:
        got = np.array(actual)
        if got.shape != right.shape or not np.array_equal(got, right):
            found.append(f"{name} is {_short(got)}, the reference has {_short(right)}")
    sums, right_sums = np.array(scan.logsumexp).astype(np.float64), expected.logsumexp
    allowed = LOGSUMEXP_TOLERANCE * np.maximum(1, np.abs(right_sums))
    with np.errstate(invalid="ignore"):
        close = np.abs(sums - right_sums) <= allowed
    if not np.where(np.isfinite(right_sums), close, sums == right_sums).all():
        found.append(f"logsumexp is {_short(sums)}, the reference has {_short(right_sums)}")
    return found


def reference_agreement(
    scan: ReferenceScan, vocab: int, draft: NDArray[np.int32], first_row: int
) -> Agreement:
    """Count confirmed draft tokens one row after the other; see `Agreement`."""
    rows = len(scan.argmax)
    last = first_row
    while last + 1 < rows and int(draft[last]) == int(scan.argmax[last]):
        last += 1
    used = scan.nan_count[first_row : last + 1]
    empty = np.flatnonzero(used == vocab)
    return Agreement(
        accepted=last - first_row,
        next_token=int(scan.argmax[last]),
        nan_count=int(used.sum()),
        empty_row=first_row + int(empty[0]) if empty.size else rows,
    )


def sampled_differences(
    scan: SampledScan,
    logits: NDArray[np.float32],
    keys: NDArray[np.uint32],
    temperature: float,
) -> list[str]:
    """Compare a sampled choice with the reference's noisy row.

    Noise may be off by two units in the last place of max(1, |noise|), so the token must be one
    whose noisy value comes as close as that to the largest.

    Args:
        scan: The scan under test.
        logits: [rows, vocab], capped.
        keys: [rows, 2].
        temperature: What the logits are divided by.

    Returns:
        One line per field that differs.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        tempered = logits / np.float32(temperature)
        noisy = (tempered + reference_gumbel(keys, logits.shape[1])).astype(np.float32)
    noisy = np.where(np.isnan(noisy), np.float32(-np.inf), noisy)
    highest = noisy.max(axis=-1)
    token = np.array(scan.token).astype(np.int64)
    chosen = np.take_along_axis(noisy, token[:, None], axis=-1)[:, 0]
    # Gumbel numbers of 24 uniform bits stay below 17.
    finite = np.where(np.isfinite(highest), highest, 0)
    slack = 2 * np.spacing(np.maximum(np.abs(finite), np.float32(17)))
    found = []
    if not np.where(np.isfinite(highest), chosen >= finite - slack, chosen == highest).all():
        found.append(f"token is {_short(token)}, the reference has {_short(noisy.argmax(-1))}")
    nans = np.isnan(logits).sum(axis=-1)
    if not np.array_equal(np.array(scan.nan_count), nans):
        found.append(f"nan_count is {_short(np.array(scan.nan_count))}, not {_short(nans)}")
    return found


def check_kernels(
    form: str | None = None,
    *,
    vocabularies: tuple[int, ...] = (1, 5, 31, 33, 1000, 4097, 49_152, 262_144),
    report: Callable[[str], None] | None = None,
) -> KernelVerdict:
    """Run the scans over hard rows and compare every field with the reference.

    A capped case is compared with the scan of the logits as the model itself caps them, on the
    same device: that is what decides whether the choice is the model's own.

    Args:
        form: "metal" or "mlx"; None takes the one that generation uses here.
        vocabularies: The row widths to try.
        report: Called with the name of each case before it runs.

    Returns:
        The verdict; it never raises for a difference.
    """
    form = form or automatic_form()
    failures: list[str] = []
    count = 0
    for name, logits, dtype, cap, top_k in _cases(vocabularies):
        if report:
            report(name)
        count += 1
        failures += [f"{name}: {line}" for line in _check_case(form, logits, dtype, cap, top_k)]
    for name, logits, dtype in _sampled_cases(vocabularies):
        if report:
            report(name)
        count += 1
        keys = np.arange(2 * len(logits), dtype=np.uint32).reshape(-1, 2) * np.uint32(2654435761)
        device_logits = mx.array(logits).astype(DTYPES[dtype])
        sampled = SampledRowScan(0.7, form=form)(device_logits, mx.array(keys))
        lines = sampled_differences(sampled, logits, keys, 0.7)
        failures += [f"{name}: {line}" for line in lines]
    info = mx.device_info()
    return KernelVerdict(
        form=form,
        device=str(info.get("device_name") or info.get("architecture") or mx.default_device()),
        mlx_version=version("mlx"),
        cases=count,
        failures=tuple(failures),
    )


def _cases(
    vocabularies: tuple[int, ...],
) -> Iterator[tuple[str, NDArray[np.float32], DtypeName, float | None, int]]:
    rng = np.random.default_rng(0)
    for vocab in vocabularies:
        for dtype in DTYPES:
            for kind in ROW_KINDS:
                # The widest rows show nothing new in every kind, and the reference sorts them all.
                if vocab > 50_000 and kind not in ("model-like", "specials", "last is largest"):
                    continue
                rows = int(rng.choice([1, 2, 5, 8, 17]))
                logits = hard_rows(kind, rows, vocab, dtype, rng)
                for cap, top_k in ((None, 0), (30.0, min(20, vocab))):
                    name = f"{kind}, {rows} x {vocab} {dtype}, cap {cap}, top {top_k}"
                    yield name, logits, dtype, cap, top_k


def _sampled_cases(
    vocabularies: tuple[int, ...],
) -> Iterator[tuple[str, NDArray[np.float32], DtypeName]]:
    rng = np.random.default_rng(1)
    for vocab in vocabularies:
        for dtype in DTYPES:
            for kind in ("model-like", "ties", "scattered NaN", "all -inf"):
                name = f"sampled, {kind}, 3 x {vocab} {dtype}"
                yield name, hard_rows(kind, 3, vocab, dtype, rng), dtype


def _check_case(
    form: str, logits: NDArray[np.float32], dtype: DtypeName, cap: float | None, top_k: int
) -> list[str]:
    rows, vocab = logits.shape
    device_logits = mx.array(logits).astype(DTYPES[dtype])
    capped = device_logits if cap is None else mlx_form.soft_cap(device_logits, cap)
    expected = reference_scan(np.array(capped.astype(mx.float32)), dtype, top_k=top_k)
    draft = expected.argmax.astype(np.int32)
    draft[rows // 2] = -1
    scan = LogitRowScan(cap, top_k, form)(device_logits, mx.array(draft), mx.array([0], mx.uint32))
    found = differences(scan, expected)
    assert scan.agreement is not None
    agreement = Agreement(*np.array(scan.agreement).tolist())
    right = reference_agreement(expected, vocab, draft, 0)
    if agreement != right:
        found.append(f"agreement is {agreement}, the reference has {right}")
    return found


def _short(values: NDArray) -> str:
    return np.array2string(values, threshold=8, edgeitems=3, separator=", ").replace("\n", "")
