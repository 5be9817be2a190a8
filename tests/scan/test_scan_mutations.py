"""Deliberate faults in the kernels, each of which the comparison must catch.

A fault counts as caught if the stand-in reports it or a field differs from the reference. A fault
that does not compile, or whose text is not found, fails the test: then it tested nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.scan import metal_form
from mlxspec.scan.check import hard_rows
from mlxspec.scan.reference import reference_scan
from tests.metal_stand_in.stand_in import KernelFault, StandIn, tanh_of
from tests.scan.rows import Case, wrong_fields

pytestmark = pytest.mark.skipif(
    mx.metal.is_available(), reason="faults are planted on the stand-in, not on a real GPU"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


class Fault(NamedTuple):
    """One edit of one kernel text, and whether rows under a cap or bare ones can show it."""

    file: str
    old: str
    new: str
    capped: bool = True


FAULTS = {
    "last maximum wins, between parts": Fault(
        "logit_row_common", "index < other_index", "index > other_index"
    ),
    "last maximum wins, within a thread": Fault(
        "logit_row_common", "bool wins = key > part.key", "bool wins = key >= part.key"
    ),
    "NaN first": Fault(
        "logit_row_common", "return -Infinity<T>::bits;", "return Infinity<T>::bits;"
    ),
    "NaN not counted": Fault("logit_row_common", "is_nan(x) ? 1 : 0", "is_nan(x) ? 0 : 0"),
    "cap left out": Fault("logit_row_scan", "if (CAPPED)", "if (CAPPED && top_k > 99)"),
    "cap after compare": Fault(
        "logit_row_scan", "include(part, x, start + i)", "include(part, values[i], start + i)"
    ),
    "cap without its roundings": Fault(
        "logit_row_common",
        "  x = static_cast<T>(x / cap);\n  x = static_cast<T>(metal::precise::tanh(x));\n"
        "  x = static_cast<T>(x * cap);\n",
        "  x = static_cast<T>(metal::precise::tanh(float(x) / float(cap)) * float(cap));\n",
    ),
    "one row off": Fault(
        "logit_row_scan", "size_t(row) * vocab;", "size_t(row == 0 ? 1 : row) * vocab;"
    ),
    "lane 31 dropped": Fault("logit_row_scan", "if (present) {", "if (present && lane != 31) {"),
    "missing barrier before the groups meet": Fault(
        "logit_row_scan", f"{BARRIER}\nif (simd_group == 0)", "if (simd_group == 0)"
    ),
    "missing barrier in a list's round": Fault(
        "logit_row_scan", f"    {BARRIER}\n    Candidate best", "    Candidate best"
    ),
    "missing barrier before the agreement": Fault("logit_row_combine", f"  {BARRIER}\n", ""),
    "tail skipped": Fault(
        "logit_row_scan", "present = start + i < end", "present = start + READ_WIDTH <= end"
    ),
    "tail read past the end": Fault(
        "logit_row_scan", "if (start + READ_WIDTH <= end)", "if (start < end)"
    ),
    "logit read twice": Fault(
        "logit_row_scan",
        "values[i] = logits[row_start + start + i];",
        "values[i] = logits[row_start + start]; values[i] = logits[row_start + start + i];",
    ),
    "turns of a list share their places": Fault(
        "logit_row_scan", "(rank % 2) * MAX_SIMD_GROUPS", "(rank % 1) * MAX_SIMD_GROUPS"
    ),
    "early return before a barrier": Fault(
        "logit_row_scan",
        f"{BARRIER}\nif (simd_group == 0)",
        f"if (simd_group != 0) return;\n{BARRIER}\nif (simd_group == 0)",
    ),
    "barrier in a branch": Fault(
        "logit_row_scan",
        f"    {BARRIER}\n    Candidate best",
        f"    if (lane == 0) {BARRIER}\n    Candidate best",
    ),
    "last split dropped": Fault(
        "logit_row_combine", "split = lane; split < splits;", "split = lane; split + 1 < splits;"
    ),
    "sum not rescaled": Fault("logit_row_common", "part.sum * decay + 1.0f", "part.sum + 1.0f"),
    "infinities not told apart": Fault(
        "logit_row_combine",
        "infinite ? highest :",
        "infinite && lane > 0 ? highest :",
        capped=False,
    ),
    "-0 below +0": Fault(
        "logit_row_common", "signed_bits(x) < 0 ? -magnitude :", "signed_bits(x) < 0 ? ~magnitude :"
    ),
    "listed entry not taken away": Fault("logit_row_scan", "keys[i] = ABSENT;", "keys[i] += 0;"),
    "list never advances": Fault(
        "logit_row_combine", "taken && i == own_list ? 1 : 0", "taken && i > own_list ? 1 : 0"
    ),
    "draft compared past the last row": Fault("logit_row_combine", "row + 1 < rows && ", ""),
    "draft compared from row 0": Fault(
        "logit_row_combine", "uint row = first_row[0];", "uint row = 0;"
    ),
    "every lane writes": Fault(
        "logit_row_combine", "if (lane == 0) {\n    const float", "if (true) {\n    const float"
    ),
    "shuffle past the last lane": Fault(
        "logit_row_common",
        "other.index = simd_shuffle_xor(part.index",
        "other.index = simd_shuffle_down(part.index",
    ),
    "shuffle in a branch": Fault(
        "logit_row_scan",
        "best_here = best_of_simd_group(own)",
        "best_here = own.key == ABSENT ? own : best_of_simd_group(own)",
    ),
    "a group that does not exist is read": Fault(
        "logit_row_scan", "if (lane < simd_groups)", "if (lane <= simd_groups)"
    ),
}


def battery(capped: bool) -> Iterator[tuple[Case, int]]:
    """Cases that meet every rule, each with an order of turns; one variant of each kernel."""
    rng = np.random.default_rng(5)
    for vocab, order in ((700, 0), (5000, 1), (33, 2)):
        for kind in ("ties", "specials", "saturated", "model-like", "scattered NaN", "all -inf"):
            logits = hard_rows(kind, 9, vocab, "bfloat16", rng)
            logits[7] = np.float32(-0.0)
            logits[7, vocab // 2] = 0.0
            yield Case(logits, "bfloat16", *((30.0, 5) if capped else (None, 0))), order


def caught(fault: Fault | None, capped: bool) -> str:
    """Run the battery with the fault planted; say what showed it, or nothing."""
    edits: tuple[tuple[str, str], ...] = ()
    if fault is not None:
        text = metal_form.kernel_text(fault.file)
        assert text.count(fault.old) == 1, "the fault has no place"
        edits = ((text, text.replace(fault.old, fault.new)),)
    for case, order in battery(capped):
        # Every row's own choice: what is confirmed ends only where the rows do.
        draft = _choices(case) if capped else None
        with StandIn(edits=edits, order_seed=order) as gpu:
            try:
                wrong = wrong_fields(case, "metal", draft, first=2)
            except KernelFault as found:
                return str(found)
            if wrong:
                return wrong[0]
            if (gpu.dispatches[0].reads["logits"] != 1).any():
                return "a logit is not read exactly once"
    return ""


def _choices(case: Case) -> np.ndarray:
    return reference_scan(
        case.logits, case.dtype, cap=case.cap, tanh=lambda v: tanh_of(v, case.dtype)
    ).argmax.astype(np.int32)


@pytest.mark.parametrize("capped", [True, False])
def test_the_battery_passes_without_a_fault(capped: bool) -> None:
    assert caught(None, capped) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    shown = caught(FAULTS[name], FAULTS[name].capped)
    assert shown, f"nothing showed this fault: {name}"
    print(f"{name}: {shown}")
