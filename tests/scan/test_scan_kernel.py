"""The Metal kernels equal the reference: on the GPU of a Mac, elsewhere on the stand-in."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.scan import LogitRowScan, metal_form
from mlxspec.scan.check import DTYPES, ROW_KINDS, check_kernels, hard_rows
from mlxspec.scan.metal_form import SplitShape
from tests.metal_stand_in.stand_in import StandIn, metal_gpu
from tests.scan.rows import Case, cases, draft_for, wrong_fields

EXAMPLES = 6 * settings.default.max_examples
only_stand_in = pytest.mark.skipif(
    mx.metal.is_available(), reason="a GPU does not count reads; the stand-in does, elsewhere"
)


@settings(max_examples=EXAMPLES)
@given(case=cases(), order_seed=st.integers(0, 9))
def test_kernel_equals_the_reference_in_every_field(case: Case, order_seed: int) -> None:
    with metal_gpu(order_seed=order_seed):
        assert wrong_fields(case, "metal") == []


@settings(max_examples=EXAMPLES // 2)
@given(case=cases(vocabularies=(9, 33, 1000), max_rows=40), data=st.data())
def test_kernel_counts_confirmed_draft_tokens_as_the_reference_does(
    case: Case, data: st.DataObject
) -> None:
    # Without a cap, so that the draft's author and the kernel need no tanh in common.
    case = Case(case.logits, case.dtype, None, case.top_k)
    draft, first = draft_for(case, data)
    with metal_gpu():
        assert wrong_fields(case, "metal", draft, first) == []


@only_stand_in
@settings(max_examples=EXAMPLES // 2)
@given(case=cases())
def test_choice_does_not_depend_on_flushed_denormals(case: Case) -> None:
    uncapped = Case(case.logits, case.dtype, None, case.top_k)
    with StandIn(flush_denormals=True):
        assert wrong_fields(uncapped, "metal") == []


@st.composite
def legal_splits(draw: st.DrawFn, vocab: int) -> SplitShape:
    threads = draw(st.sampled_from((32, 64, 96, 160, 256)))
    most = min(vocab, threads * metal_form.THREAD_LOGITS)
    fewest = min(most, -(-vocab // 60))
    shape = SplitShape.covering(vocab, draw(st.integers(fewest, most)), threads)
    # Splits past the end of the row are legal and must change nothing.
    return SplitShape(shape.length, shape.threads, shape.count + draw(st.integers(0, 3)))


@settings(max_examples=EXAMPLES)
@given(case=cases(vocabularies=(1, 2, 31, 33, 200, 1000, 4097), max_rows=2), data=st.data())
def test_every_legal_split_gives_the_same_answer(case: Case, data: st.DataObject) -> None:
    vocab = case.logits.shape[1]
    # Up to 63 splits of 256 threads: a longer list in each would only take longer.
    top_k = min(case.top_k, vocab, 5)
    split = data.draw(legal_splits(vocab))
    with metal_gpu(order_seed=data.draw(st.integers(0, 3))):
        usual = metal_form.scan_rows(case.device_logits, cap=case.cap, top_k=top_k)
        other = metal_form.scan_rows(case.device_logits, cap=case.cap, top_k=top_k, split=split)
    for name in ("argmax", "maximum", "nan_count", "top_values", "top_indices"):
        left, right = getattr(usual, name), getattr(other, name)
        assert (left is None and right is None) or left.tolist() == right.tolist(), name
    left, right = np.array(usual.logsumexp, np.float64), np.array(other.logsumexp, np.float64)
    finite = np.isfinite(left)
    assert (left[~finite] == right[~finite]).all()
    left, right = left[finite], right[finite]
    assert (np.abs(left - right) <= 2e-6 * np.maximum(1, np.abs(left))).all()


def test_a_row_is_scanned_alike_in_a_tile_of_any_width() -> None:
    logits = mx.array(hard_rows("model-like", 9, 9000, "bfloat16", np.random.default_rng(1)))
    with metal_gpu():
        wide = LogitRowScan(30.0, form="metal")(logits)
        for rows in (1, 2, 5):
            narrow = LogitRowScan(30.0, form="metal")(logits[:rows])
            assert narrow.argmax.tolist() == wide.argmax[:rows].tolist()
            # Bit for bit: log-probabilities, too, are promised not to change with drafting.
            assert narrow.logsumexp.tolist() == wide.logsumexp[:rows].tolist()


@only_stand_in
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("vocab", [1, 7, 33, 4096, 4097, 9000])
def test_each_logit_is_read_exactly_once_in_two_dispatches(vocab: int, top_k: int) -> None:
    with StandIn() as gpu:
        LogitRowScan(30.0, top_k, form="metal")(mx.zeros((3, vocab), mx.bfloat16))
    assert [d.kernel.split("__")[0] for d in gpu.dispatches] == [
        "custom_kernel_mlxspec_logit_row_scan",
        "custom_kernel_mlxspec_logit_row_combine",
    ]
    reads = gpu.dispatches[0].reads["logits"]
    assert reads.size == 3 * vocab
    assert (reads == 1).all()


@only_stand_in
def test_a_row_of_gemma_is_spread_over_many_threadgroups() -> None:
    rows = hard_rows("model-like", 2, 262_144, "bfloat16", np.random.default_rng(2))
    rows[1, 262_143] = 100.0
    case = Case(rows, "bfloat16", 30.0, 8)
    with StandIn() as gpu:
        assert wrong_fields(case, "metal") == []
    scan, combine = gpu.dispatches
    groups = scan.grid[0] // scan.threadgroup[0] * scan.grid[1]
    print(
        f"\n262144 x 2 bfloat16: {len(gpu.dispatches)} dispatches, {groups} threadgroups,", end=" "
    )
    print(f"{scan.reads['logits'].mean():.2f} reads a logit")
    assert groups == 2 * 64
    assert (scan.reads["logits"] == 1).all()
    assert scan.threadgroup_bytes <= 32768
    assert combine.threadgroup_bytes <= 32768


@only_stand_in
def test_everything_the_caller_sees_is_written() -> None:
    draft = mx.array([1, -1], mx.int32)
    with StandIn() as gpu:
        LogitRowScan(top_k=3, form="metal")(mx.zeros((2, 50)), draft)
        assert set(gpu.dispatches[1].unwritten.values()) == {0}
        LogitRowScan(form="metal")(mx.zeros((2, 50)))
        unused = gpu.dispatches[3].unwritten
        assert {name for name, count in unused.items() if count} == {
            *("top_value", "top_index", "agreement")
        }


@settings(max_examples=EXAMPLES // 4)
@given(case=cases(vocabularies=(33, 1000)), kind=st.sampled_from(("transposed", "strided", "cut")))
def test_rows_that_are_not_contiguous_are_read_rightly(case: Case, kind: str) -> None:
    dense = case.device_logits
    if kind == "transposed":
        view = mx.contiguous(dense.T).T
    elif kind == "strided":
        view = mx.stack([dense, dense + 1], axis=-1)[..., 0]
    else:
        view = mx.pad(dense, [(0, 0), (3, 2)])[:, 3:-2]
    scan = LogitRowScan(top_k=3, form="metal")
    with metal_gpu():
        left, right = scan(view), scan(dense)
    for name in ("argmax", "maximum", "nan_count", "top_indices"):
        assert getattr(left, name).tolist() == getattr(right, name).tolist()


def test_lists_longer_than_the_kernel_holds_are_right_too() -> None:
    rows = hard_rows("ties", 2, 300, "float16", np.random.default_rng(3))
    with metal_gpu():
        assert wrong_fields(Case(rows, "float16", None, 100), "metal") == []


def test_the_command_s_comparison_passes_on_the_kernel() -> None:
    with metal_gpu():
        verdict = check_kernels(
            "mlx" if not mx.metal.is_available() else "metal", vocabularies=(33,)
        )
    assert verdict.passed, verdict


@pytest.mark.parametrize("kind", sorted(ROW_KINDS))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_hard_rows_are_scanned_rightly(dtype: str, kind: str) -> None:
    rows = hard_rows(kind, 3, 333, dtype, np.random.default_rng(4))
    with metal_gpu(order_seed=1):
        assert wrong_fields(Case(rows, dtype, 30.0, 5), "metal") == []


def test_kernel_call_traces_inside_a_compiled_function() -> None:
    scan = LogitRowScan(30.0, 4, form="metal")

    def tile(x: mx.array) -> list[mx.array]:
        found = scan(mx.tanh(x), mx.array([1, 2], mx.int32))
        return [found.argmax, found.agreement]

    logits = mx.zeros((2, 500), mx.float16)
    if mx.metal.is_available():
        assert mx.compile(tile)(logits)[0].tolist() == [0, 0]
    else:
        recorded = []
        mx.export_function(recorded.append, mx.compile(tile), logits)
        names = [str(event.get("name", "")) for event in recorded]
        assert sum("CustomKernel" in name for name in names) == 2


def test_limits_in_python_are_the_ones_in_the_kernels() -> None:
    text = "".join(
        metal_form.kernel_text(name)
        for name in ("logit_row_common", "logit_row_scan", "logit_row_combine")
    )

    def constant(name: str) -> int:
        return int(re.search(rf"constexpr uint {name} = (\d+);", text)[1])

    assert constant("SIMD_SIZE") == metal_form.SIMD_SIZE
    assert constant("SIMD_SIZE") * constant("MAX_SIMD_GROUPS") == metal_form.MAX_THREADS
    assert constant("READ_WIDTH") * constant("READS") == metal_form.THREAD_LOGITS
    assert constant("MAX_AGREE_ROWS") == metal_form.MAX_AGREE_ROWS


@pytest.mark.parametrize(
    ("length", "threads", "count"), [(1, 33, 1), (1, 288, 1), (0, 32, 1), (513, 32, 1), (1, 32, 0)]
)
def test_impossible_splits_are_refused(length: int, threads: int, count: int) -> None:
    with pytest.raises(ValueError, match="got"):
        SplitShape(length, threads, count)


def test_what_the_kernels_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k must be 0 to 32, got 33"):
        metal_form.scan_rows(mx.zeros((1, 100)), top_k=33)
    with pytest.raises(ValueError, match="does not cover 100 logits"):
        metal_form.scan_rows(mx.zeros((1, 100)), split=SplitShape(50, 32, 1))
    with pytest.raises(ValueError, match="at most 256 rows, got 257"):
        metal_form.scan_rows(mx.zeros((257, 4)), draft=mx.zeros(257, mx.int32))


@only_stand_in
def test_without_metal_the_kernel_form_says_so() -> None:
    with pytest.raises(RuntimeError, match="No Metal"):
        LogitRowScan(form="metal")(mx.zeros((1, 4)))
    assert LogitRowScan()(mx.zeros((1, 4))).argmax.item() == 0
