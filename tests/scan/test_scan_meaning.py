"""The rules of the scan, in the MLX form and in the reference that every form is held to."""

from __future__ import annotations

import io

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.scan import Agreement, LogitRowScan, check_kernels, mlx_form
from mlxspec.scan.check import DTYPES, KernelVerdict
from mlxspec.scan.reference import round_to
from tests.scan.rows import Case, cases, draft_for, wrong_fields

EXAMPLES = 10 * settings.default.max_examples
NAN, INF = float("nan"), float("inf")


@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_mlx_form_equals_the_reference_in_every_field(case: Case) -> None:
    assert wrong_fields(case, "mlx") == []


@settings(max_examples=EXAMPLES // 2)
@given(case=cases(), data=st.data())
def test_mlx_form_counts_confirmed_draft_tokens_as_the_reference_does(
    case: Case, data: st.DataObject
) -> None:
    draft, first = draft_for(case, data)
    assert wrong_fields(case, "mlx", draft, first) == []


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@settings(max_examples=EXAMPLES // 2)
@given(case=cases(vocabularies=(1, 2, 33, 1000)))
def test_choice_is_the_argmax_of_the_models_own_capped_logits(compiled: bool, case: Case) -> None:
    cap = case.cap or 30.0
    logits = mx.where(mx.isnan(case.device_logits), -INF, case.device_logits)

    def model_choice(x: mx.array) -> mx.array:
        # As gemma2 of mlx-lm writes it.
        out = mx.tanh(x / cap)
        out = out * cap
        return mx.argmax(out, axis=-1)

    scan = LogitRowScan(cap, form="mlx")
    choice = (mx.compile(lambda x: scan(x).argmax) if compiled else lambda x: scan(x).argmax)(
        logits
    )
    assert (
        choice.tolist() == (mx.compile(model_choice) if compiled else model_choice)(logits).tolist()
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_saturated_logits_tie_and_the_first_wins(dtype: str) -> None:
    logits = mx.array([[0.0, 400.0, 500.0, 450.0]]).astype(DTYPES[dtype])
    assert LogitRowScan(cap=30.0, form="mlx")(logits).argmax.item() == 1
    assert LogitRowScan(form="mlx")(logits).argmax.item() == 2


@pytest.mark.parametrize(
    ("row", "index", "maximum", "nans"),
    [
        ([NAN, 1.0, 2.0], 2, 2.0, 1),
        ([NAN, NAN], 0, -INF, 2),
        ([-INF, -INF], 0, -INF, 0),
        ([NAN, -INF], 0, -INF, 1),
        ([-INF, NAN, -5.0], 2, -5.0, 1),
        ([NAN, INF, INF], 1, INF, 1),
        ([-0.0, 0.0], 0, 0.0, 0),
        ([-1.0, 0.0, -0.0], 1, 0.0, 0),
        ([3.0], 0, 3.0, 0),
    ],
)
def test_nan_counts_as_lowest_and_the_first_maximum_wins(
    row: list[float], index: int, maximum: float, nans: int
) -> None:
    scan = LogitRowScan(form="mlx")(mx.array([row]))
    assert scan.argmax.item() == index
    assert scan.maximum.item() == maximum
    assert scan.nan_count.item() == nans


def test_list_is_by_value_then_index() -> None:
    scan = LogitRowScan(top_k=9, form="mlx")(mx.array([[1.0, NAN, 2.0, 1.0, -INF, 2.0]]))
    assert scan.top_indices is not None
    assert scan.top_values is not None
    assert scan.top_indices.tolist() == [[2, 5, 0, 3, 1, 4]]
    assert scan.top_values.tolist() == [[2.0, 2.0, 1.0, 1.0, -INF, -INF]]


def test_agreement_is_a_handful_of_integers() -> None:
    rows = np.full((4, 5), -1.0, np.float32)
    rows[[0, 1, 3], [2, 4, 1]] = 1.0
    rows[2] = NAN
    draft = mx.array([2, 4, 3, -1], mx.int32)
    scan = LogitRowScan(form="mlx")(mx.array(rows), draft)
    assert scan.agreement is not None
    assert Agreement(*scan.agreement.tolist()) == Agreement(
        accepted=2, next_token=0, nan_count=5, empty_row=2
    )


def test_a_row_is_scanned_alike_whatever_stands_beside_it() -> None:
    row = mx.random.normal((1, 1000), key=mx.random.key(1)) * 5
    alone = LogitRowScan(form="mlx")(row)
    beside = LogitRowScan(form="mlx")(mx.concatenate([row * 3, mx.full((3, 1000), NAN), row]))
    assert beside.argmax[-1].item() == alone.argmax.item()
    assert beside.logsumexp[-1].item() == alone.logsumexp.item()


def test_an_unused_field_is_not_computed() -> None:
    graph = io.StringIO()
    scan = LogitRowScan(cap=30.0, top_k=5, form="mlx")(mx.zeros((2, 64)))
    mx.export_to_dot(graph, scan.argmax)
    assert "ArgReduce" in graph.getvalue()
    assert "LogSumExp" not in graph.getvalue()
    assert "Partition" not in graph.getvalue()


def test_scan_traces_inside_a_compiled_function() -> None:
    scan = LogitRowScan(cap=30.0, top_k=3, form="mlx")
    logits = mx.random.normal((3, 500), key=mx.random.key(2)) * 50
    eager, traced = scan(logits), mx.compile(lambda x: tuple(scan(x)[:6]))(logits)
    for left, right in zip(eager[:6], traced, strict=True):
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("vocab", [49_153, 262_144])
def test_logsumexp_of_a_wide_row_keeps_its_digits(vocab: int, spread: float) -> None:
    logits = (np.random.default_rng(3).normal(size=(1, vocab)) * spread).astype(np.float32)
    assert wrong_fields(Case(logits, "float32", None, 0), "mlx") == []


def test_reference_rounds_as_the_formats_do() -> None:
    values = np.array([1.0, -1.0 / 3, 65519.9, 65520.0, 1e-8, -7e-8, 3.4e38, np.inf, 1e-41], float)
    for dtype in ("float16", "bfloat16"):
        right = mx.array(values.astype(np.float32)).astype(DTYPES[dtype]).astype(mx.float32)
        assert round_to(values, dtype).tolist() == right.tolist()
    assert np.isnan(round_to(np.array([np.nan, -np.nan]), "bfloat16")).all()


def test_cap_reads_as_the_models_do() -> None:
    x = mx.array([[100.0, -3.0, 0.25]], mx.bfloat16)
    assert mlx_form.soft_cap(x, 30.0).tolist() == (mx.tanh(x / 30.0) * 30.0).tolist()


def test_the_whole_comparison_passes_here_and_says_where_it_ran() -> None:
    verdict = check_kernels("mlx", vocabularies=(1, 33, 1000))
    assert verdict.passed, verdict
    assert verdict.cases == 3 * 3 * (9 * 2 + 4)
    assert "equal the reference" in str(verdict)


def test_a_verdict_names_every_difference() -> None:
    verdict = KernelVerdict("metal", "a GPU", "0", 2, ("ties, 1 x 5: argmax is [1]",))
    assert not verdict.passed
    assert "1 differences in 2 cases" in str(verdict)
    assert "ties, 1 x 5: argmax is [1]" in str(verdict)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cap": 0.0}, "cap must be a positive number or None, got 0.0"),
        ({"cap": NAN}, "cap must be a positive number"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"form": "cuda"}, "form must be one of"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitRowScan(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mx.zeros((3,)),), "must be \\[rows, vocab\\]"),
        ((mx.zeros((0, 3)),), "not empty"),
        ((mx.zeros((1, 3), mx.int32),), "float32, float16 or bfloat16"),
        ((mx.zeros((2, 3)), mx.array([1])), "one token a row"),
        ((mx.zeros((2, 3)), None, mx.array([1])), "pass the draft too"),
    ],
)
def test_impossible_rows_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitRowScan()(*arguments)
