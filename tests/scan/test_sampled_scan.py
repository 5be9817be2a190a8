"""The seeded choice: one generator in all forms, and noise that hangs on the key alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.scan import SampledRowScan, SampledScan, metal_form, mlx_form
from mlxspec.scan.check import DTYPES, hard_rows, sampled_differences
from mlxspec.scan.metal_form import SplitShape
from mlxspec.scan.reference import reference_bits, reference_gumbel, reference_scan
from tests.metal_stand_in.stand_in import KernelFault, StandIn, metal_gpu
from tests.scan.rows import Case, cases, mlx_tanh

EXAMPLES = 4 * settings.default.max_examples
NAN, INF = float("nan"), float("inf")
keys_of_rows = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=5, max_size=5
)


def two_ulp(noise: np.ndarray) -> np.ndarray:
    """Two units in the last place of the noise, or of 1 where the second logarithm nears zero."""
    return 2 * np.spacing(np.maximum(1, np.abs(noise)).astype(np.float32))


def open_rows(vocab: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows that leave one index each, so that the maximum is the noise of that index."""
    return mx.where(mx.eye(vocab) > 0, 0.0, -INF).astype(dtype)


@settings(max_examples=EXAMPLES)
@given(keys=keys_of_rows, vocab=st.integers(1, 300))
def test_reference_draws_the_bits_of_mlx(keys: list, vocab: int) -> None:
    key = np.array(keys[0], np.uint32)
    bits = reference_bits(key, 2 * vocab)
    assert bits.tolist() == mx.random.split(mx.array(key), vocab).flatten().tolist()
    # An odd row, through the 24 bits a uniform number shows.
    odd = reference_bits(key, 2 * vocab - 1).astype(np.float32) / np.float32(2**32)
    uniform = mx.random.uniform(shape=(2 * vocab - 1,), key=mx.array(key))
    assert np.minimum(odd, np.float32(1 - 2**-24)).tolist() == uniform.tolist()


@settings(max_examples=EXAMPLES)
@given(keys=keys_of_rows, vocab=st.sampled_from((1, 2, 3, 64, 1001)))
def test_mlx_form_draws_the_noise_of_the_reference(keys: list, vocab: int) -> None:
    array = np.array(keys, np.uint32)
    noise = np.array(mlx_form.gumbel_noise(mx.array(array), vocab))
    right = reference_gumbel(array, vocab)
    assert (np.abs(noise - right) <= two_ulp(right)).all()


@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_kernel_draws_the_noise_of_the_reference(vocab: int, dtype: str) -> None:
    keys = np.tile(np.array([[2**31 + 5, 77]], np.uint32), (vocab, 1))
    with metal_gpu():
        scan = metal_form.sample_rows(open_rows(vocab, DTYPES[dtype]), mx.array(keys), 1.0)
    right = reference_gumbel(keys[:1], vocab)[0]
    assert scan.argmax.tolist() == list(range(vocab))
    assert (np.abs(np.array(scan.maximum) - right) <= two_ulp(right)).all()


@settings(max_examples=EXAMPLES)
@given(
    case=cases(vocabularies=(1, 2, 33, 600, 8200)),
    keys=keys_of_rows,
    temperature=st.sampled_from((0.01, 0.7, 1.0, 1.7)),
    data=st.data(),
)
def test_kernel_and_mlx_form_choose_a_maximum_of_the_noisy_row(
    case: Case, keys: list, temperature: float, data: st.DataObject
) -> None:
    rows, vocab = case.logits.shape
    case = Case(case.logits, case.dtype, None, 0)
    row_keys = np.array(keys[:rows], np.uint32)
    pairs = -(-vocab // 2)
    threads = data.draw(st.sampled_from((32, 96, 256)))
    most = min(pairs, threads * metal_form.THREAD_LOGITS)
    split = SplitShape.covering(pairs, data.draw(st.integers(-(-most // 8), most)), threads)
    with metal_gpu(order_seed=data.draw(st.integers(0, 3))):
        kernel = metal_form.sample_rows(
            case.device_logits, mx.array(row_keys), temperature, split=split
        )
    mlx_scan = SampledRowScan(temperature, form="mlx")(case.device_logits, mx.array(row_keys))

    kernel_scan = SampledScan(kernel.argmax, kernel.nan_count)
    assert sampled_differences(kernel_scan, case.logits, row_keys, temperature) == []
    assert sampled_differences(mlx_scan, case.logits, row_keys, temperature) == []


@pytest.mark.parametrize("form", ["mlx", "metal"])
def test_a_position_draws_the_same_in_any_row_of_any_tile(form: str) -> None:
    logits = mx.array(hard_rows("ties", 1, 700, "bfloat16", np.random.default_rng(1)))
    keys = mx.array([[3, 4], [1, 2], [3, 4], [9, 9]], mx.uint32)
    scan = SampledRowScan(0.8, cap=30.0, form=form)
    with metal_gpu():
        alone = scan(logits, keys[:1]).token.item()
        tile = scan(mx.repeat(logits, 4, axis=0), keys).token.tolist()
    assert tile[0] == tile[2] == alone
    assert len({tile[1], tile[3], alone}) > 1


@pytest.mark.parametrize("form", ["mlx", "metal"])
def test_choices_follow_the_distribution(form: str) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = mx.broadcast_to(mx.array(np.log(probabilities).astype(np.float32)), (1000, 4))
    keys = mx.stack([mx.arange(1000), mx.full((1000,), 7)], axis=1).astype(mx.uint32)
    with metal_gpu():
        tokens = np.array(SampledRowScan(1.0, form=form)(logits, keys).token)
    counts = np.bincount(tokens, minlength=4)
    deviation = np.sqrt(1000 * probabilities * (1 - probabilities))
    assert (np.abs(counts - 1000 * probabilities) < 4 * deviation).all()


@pytest.mark.parametrize("form", ["mlx", "metal"])
def test_nan_and_what_a_filter_took_away_are_never_chosen(form: str) -> None:
    row = [NAN, -INF, 0.0, -INF, NAN, -3.0]
    keys = mx.stack([mx.arange(200), mx.arange(200)], axis=1).astype(mx.uint32)
    logits = mx.broadcast_to(mx.array(row), (200, 6))
    with metal_gpu():
        scan = SampledRowScan(2.0, form=form)(logits, keys)
        nothing = SampledRowScan(2.0, form=form)(mx.full((1, 6), NAN), keys[:1])
    assert set(scan.token.tolist()) == {2, 5}
    assert set(scan.nan_count.tolist()) == {2}
    assert (nothing.token.item(), nothing.nan_count.item()) == (0, 6)


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU does not count reads")
@pytest.mark.parametrize("vocab", [1, 2, 33, 8193, 9000])
def test_each_logit_is_read_once_and_no_noise_is_stored(vocab: int) -> None:
    with StandIn() as gpu:
        SampledRowScan(1.0, form="metal")(mx.zeros((2, vocab)), mx.zeros((2, 2), mx.uint32))
    assert len(gpu.dispatches) == 2
    assert (gpu.dispatches[0].reads["logits"] == 1).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_cap_comes_first_as_the_model_rounds_it(dtype: str) -> None:
    logits = hard_rows("saturated", 3, 400, dtype, np.random.default_rng(2))
    keys = np.array([[1, 2], [3, 4], [5, 6]], np.uint32)
    scan = SampledRowScan(0.5, cap=30.0, form="mlx")
    tokens = scan(mx.array(logits).astype(DTYPES[dtype]), mx.array(keys)).token
    capped = reference_scan(logits, dtype, cap=30.0, top_k=400, tanh=lambda v: mlx_tanh(v, dtype))
    rows = np.empty_like(logits)
    np.put_along_axis(rows, capped.top_indices.astype(int), capped.top_values, axis=-1)
    noise = np.array(mlx_form.gumbel_noise(mx.array(keys), 400))
    assert tokens.tolist() == (rows / np.float32(0.5) + noise).argmax(axis=-1).tolist()


def test_scan_traces_inside_a_compiled_function() -> None:
    scan = SampledRowScan(0.7, form="mlx")
    logits = mx.random.normal((3, 500), key=mx.random.key(2))
    keys = mx.array([[1, 2], [3, 4], [5, 6]], mx.uint32)
    traced = mx.compile(lambda x, k: scan(x, k).token)
    assert traced(logits, keys).tolist() == scan(logits, keys).token.tolist()
    assert traced(logits, keys + 1).tolist() == scan(logits, keys + 1).token.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"temperature": INF}, "temperature must be a positive number"),
        ({"temperature": 1.0, "cap": -1.0}, "cap must be a positive number"),
        ({"temperature": 1.0, "form": "cuda"}, "form must be one of"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampledRowScan(**options)


def test_impossible_rows_and_splits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keys must be \(2, 2\) uint32, got \(2,\)"):
        SampledRowScan(1.0)(mx.zeros((2, 5)), mx.zeros(2, mx.uint32))
    with pytest.raises(ValueError, match="does not cover 50 pairs"):
        metal_form.sample_rows(
            mx.zeros((1, 100)), mx.zeros((1, 2), mx.uint32), 1.0, split=SplitShape(10, 32, 1)
        )


FAULTS = {
    "halves of a pair swapped": (
        "sampled_row_scan",
        "second ? bits.high : bits.low",
        "second ? bits.low : bits.high",
    ),
    "last pair of an odd row counted on": (
        "threefry",
        "i + half_of_n < n ? i + half_of_n : 0",
        "i + half_of_n",
    ),
    "a rotation of another generator": ("threefry", "even ? 15 : 29", "even ? 15 : 28"),
    "one round too few": ("threefry", "group < 5", "group < 4"),
    "noise of the row above": (
        "sampled_row_scan",
        "keys[2 * row];",
        "keys[2 * (row ? row - 1 : 0)];",
    ),
    "temperature left out": ("sampled_row_scan", "float(x) / temperature", "float(x)"),
    "second half left out": ("sampled_row_scan", "second < 2", "second < 1"),
}


@pytest.mark.skipif(mx.metal.is_available(), reason="faults are planted on the stand-in")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    file, old, new = FAULTS[name]
    text = metal_form.kernel_text(file)
    assert text.count(old) == 1, "the fault has no place"
    shown = False
    for rows, vocab in ((64, 3), (3, 33), (3, 1000)):
        # Rows near flat: every index has its chance, so wrong noise means another choice.
        rng = np.random.default_rng(vocab)
        logits = rng.normal(size=(rows, vocab)).astype(np.float32)
        keys = rng.integers(0, 2**32, (rows, 2), dtype=np.uint64).astype(np.uint32)
        with StandIn(edits=((text, text.replace(old, new)),)):
            try:
                scan = SampledRowScan(0.3, form="metal")(mx.array(logits), mx.array(keys))
                shown |= bool(sampled_differences(scan, logits, keys, 0.3))
            except KernelFault:
                shown = True
    assert shown, f"nothing showed this fault: {name}"
