"""Strategies for rows of logits, and the comparison of a scan with its reference."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlxspec.scan import Agreement, LogitRowScan
from mlxspec.scan.check import DTYPES, differences, reference_agreement
from mlxspec.scan.reference import DtypeName, reference_scan, round_to
from tests.metal_stand_in.stand_in import tanh_of

# Around the widths of SIMD groups, threadgroups' reads and splits.
VOCABULARIES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257),
    *(1000, 1023, 1024, 1025, 4095, 4096, 4097, 8200),
)
SPECIAL_VALUES = (
    *(np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0),
    # Denormals of each format, and its largest numbers.
    *(1e-45, -1e-45, 1e-41, 6e-8, -6e-8, 1e-39, 65504.0, -65504.0, 3.4e38, -3.4e38, 3.3e38),
)


@dataclass(frozen=True)
class Case:
    """Rows of logits, exact in `dtype`, and what to scan them for."""

    logits: np.ndarray
    dtype: DtypeName
    cap: float | None
    top_k: int

    @property
    def device_logits(self) -> mx.array:
        return mx.array(self.logits).astype(DTYPES[self.dtype])


def numbers() -> st.SearchStrategy[float]:
    """Any float, with what scans stumble over drawn often; sizes that saturate a cap too."""
    return st.one_of(
        st.sampled_from(SPECIAL_VALUES),
        st.floats(min_value=-5, max_value=5, width=32),
        st.floats(min_value=-400, max_value=400, width=32),
        st.floats(width=32),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    vocabularies: tuple[int, ...] = VOCABULARIES,
    max_rows: int = 5,
    max_top_k: int = 40,
) -> Case:
    """Rows filled from a small palette, so that ties are everywhere, or from a normal one."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    rows = draw(st.integers(1, max_rows))
    vocab = draw(st.sampled_from(vocabularies))
    palette = np.array(draw(st.lists(numbers(), min_size=1, max_size=6)), np.float32)
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = chance.choice(palette, size=(rows, vocab))
    if draw(st.booleans()):
        spread = draw(st.sampled_from((0.01, 3.0, 300.0)))
        mixed = chance.random((rows, vocab)) < draw(st.sampled_from((0.5, 0.99)))
        logits = np.where(mixed, chance.normal(size=(rows, vocab)) * spread, logits)
    return Case(
        logits=round_to(logits, dtype),
        dtype=dtype,
        cap=draw(st.sampled_from((None, None, 30.0, 15.0, 7.3, 0.5))),
        top_k=draw(st.sampled_from((0, 1, 2, 5, 17, max_top_k))),
    )


def mlx_tanh(values: np.ndarray, dtype: DtypeName) -> np.ndarray:
    """MLX's own hyperbolic tangent in `dtype`, on values held in float32."""
    return np.array(mx.tanh(mx.array(values).astype(DTYPES[dtype])).astype(mx.float32))


def wrong_fields(case: Case, form: str, draft: np.ndarray | None = None, first: int = 0) -> list:
    """Scan a case and list what differs from the reference; see `check.differences`."""
    # On a Mac the kernel uses the GPU's tanh, which is MLX's there; elsewhere the stand-in's.
    own = tanh_of if form == "metal" and not mx.metal.is_available() else mlx_tanh
    expected = reference_scan(
        case.logits,
        case.dtype,
        cap=case.cap,
        top_k=case.top_k,
        tanh=lambda values: own(values, case.dtype),
    )
    scanner = LogitRowScan(case.cap, case.top_k, form)
    if draft is None:
        return differences(scanner(case.device_logits), expected)
    scan = scanner(case.device_logits, mx.array(draft), mx.array([first], mx.uint32))
    found = differences(scan, expected)
    agreement = Agreement(*np.array(scan.agreement).tolist())
    right = reference_agreement(expected, case.logits.shape[1], draft, first)
    if agreement != right:
        found.append(f"{agreement}, the reference has {right}")
    return found


def draft_for(case: Case, data: st.DataObject) -> tuple[np.ndarray, int]:
    """Draw a draft that is right up to some row, and where its block starts."""
    rows, vocab = case.logits.shape
    right = reference_scan(
        case.logits, case.dtype, cap=case.cap, tanh=lambda v: mlx_tanh(v, case.dtype)
    ).argmax
    draft = right.astype(np.int32)
    wrong = data.draw(st.integers(0, rows))
    draft[wrong:] = data.draw(st.sampled_from((-1, 0, vocab - 1)))
    return draft, data.draw(st.integers(0, rows - 1))
