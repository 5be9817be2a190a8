"""The stand-in finds what it promises to find, and computes as Metal specifies."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_stand_in import stand_in
from tests.metal_stand_in.stand_in import KernelFault, StandIn, StandInError

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="a Mac runs the kernels themselves")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(
    body: str,
    inputs: list[mx.array] | None = None,
    *,
    grid: int = 64,
    threads: int = 64,
    out: mx.Dtype = mx.float32,
    size: int | None = None,
    header: str = "",
    **options: Any,
) -> tuple[mx.array, StandIn]:
    """Run a one-line kernel with inputs a, b, ... and one output `out` of `size` elements."""
    inputs = inputs or []
    with StandIn(**options) as gpu:
        kernel = mx.fast.metal_kernel(
            name="probe",
            input_names=["a", "b", "c"][: len(inputs)],
            output_names=["out"],
            source=body,
            header=header,
        )
        result = kernel(
            inputs=inputs,
            grid=(grid, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(grid if size is None else size,)],
            output_dtypes=[out],
        )
    return result[0], gpu


INDEX = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup; (void)lane;"
SHARED = f"{INDEX} threadgroup float s[64]; uint t = thread_index_in_threadgroup;"


def test_it_runs_the_whole_grid_and_counts_reads() -> None:
    values = mx.arange(100, dtype=mx.float32)
    result, gpu = run(f"{INDEX} out[i] = a[i] * 2 + a[0];", [values], grid=100)
    assert result.tolist() == (values * 2).tolist()
    reads = gpu.dispatches[0].reads["a"]
    assert reads[0] == 101
    assert (reads[1:] == 1).all()


def test_grid_counts_threads_and_the_last_threadgroup_may_be_smaller() -> None:
    body = (
        "out[thread_position_in_grid.x] = threads_per_threadgroup.x * 10 + threadgroups_per_grid.x;"
    )
    result, _ = run(body, grid=80, threads=64)
    assert result.tolist() == [642.0] * 64 + [162.0] * 16


@pytest.mark.parametrize("seed", range(4))
def test_simd_groups_run_in_lockstep_in_any_order(seed: int) -> None:
    body = f"""{SHARED}
    float x = a[i];
    for (ushort d = 16; d > 0; d /= 2) {{ x += simd_shuffle_xor(x, d); }}
    if (lane == 0) {{ s[simdgroup_index_in_threadgroup] = x; }}
    {BARRIER}
    out[i] = s[0] + s[1]; (void)t;"""
    values = mx.arange(64, dtype=mx.float32)
    result, gpu = run(body, [values], order_seed=seed)
    assert result.tolist() == [64 * 63 / 2] * 64
    assert gpu.dispatches[0].barriers == 1
    assert gpu.dispatches[0].shuffles == 2 * 5
    assert gpu.dispatches[0].threadgroup_bytes == 256


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{INDEX} out[i] = a[i + 1];", r"a\[64\] read, it has 64 elements"),
        (f"{INDEX} out[i + 1] = a[i];", r"out\[64\] written, it has 64 elements"),
        (f"{INDEX} out[i / 2] = a[i];", r"out\[0\] written twice"),
        (f"{SHARED} out[i] = s[t] + a[i];", r"s\[0\] read, but nobody wrote it"),
        (f"{SHARED} s[t + 1] = a[i]; out[i] = 0;", r"s\[64\] written, it has 64"),
        (
            f"{SHARED} s[t] = a[i]; {BARRIER} s[t] = a[i]; out[i] = s[63 - t];",
            "reads what thread 63 wrote|overwrites what another just read",
        ),
        (f"{SHARED} s[0] = a[i]; {BARRIER} out[i] = s[0] + t;", "write it, no barrier between"),
        (f"{SHARED} if (t < 32) {{ {BARRIER} }} out[i] = a[i];", "32 of 64 threads reach it"),
        (f"{SHARED} if (t == 9) return; {BARRIER} out[i] = a[i];", "63 of 64 threads reach it"),
        (
            f"{SHARED} if (t < 32) {{ {BARRIER} }} else {{\n {BARRIER} }} out[i] = a[i];",
            "at different lines",
        ),
        (
            f"{INDEX} float x = a[i]; if (lane < 16) x = simd_shuffle_xor(x, 16); out[i] = x;",
            "a shuffle reads lane 16, which is not active",
        ),
        (f"{INDEX} out[i] = simd_shuffle_down(a[i], 1);", "reads lane 32, which is not active"),
        (f"{INDEX} while (a[i] >= 0) {{}} out[i] = 0;", "does not end"),
        (f"{INDEX} threadgroup float big[8193]; big[i] = 0; out[i] = a[i];", "Metal grants 32768"),
    ],
)
def test_a_fault_is_reported(body: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        run(body, [mx.arange(64, dtype=mx.float32)])


def test_a_fault_does_not_spoil_the_next_run() -> None:
    values = mx.arange(64, dtype=mx.float32)
    for _ in range(2):
        with pytest.raises(KernelFault):
            run(f"{SHARED} if (t < 40) {{ {BARRIER} }} out[i] = a[i];", [values])
        assert run(f"{INDEX} out[i] = a[i];", [values])[0].tolist() == values.tolist()


def test_too_many_threads_are_refused_as_by_metal() -> None:
    with pytest.raises(KernelFault, match="a threadgroup of 1025 threads"):
        run(f"{INDEX} out[i] = 0;", grid=1025, threads=1025)


def test_an_output_nobody_wrote_is_no_input() -> None:
    with StandIn() as gpu:
        call = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1)}
        call |= {"output_shapes": [(8,)], "output_dtypes": [mx.float32]}
        options = {"name": "probe", "output_names": ["out"]}
        half_written = mx.fast.metal_kernel(
            input_names=[], source=f"{INDEX} if (i < 4) out[i] = 1;", **options
        )(inputs=[], **call)
        assert gpu.dispatches[0].unwritten == {"out": 4}
        reader = mx.fast.metal_kernel(
            input_names=["a"], source=f"{INDEX} out[i] = a[i];", **options
        )
        with pytest.raises(KernelFault, match=r"a\[4\] read, but nobody wrote it"):
            reader(inputs=half_written, **call)


def test_address_spaces_do_not_mix() -> None:
    device = "stand_in::Input<float, stand_in::Space::device_memory>"
    header = f"inline float first({device} p) {{ return p[0]; }}"
    body = f"{INDEX} out[i] = first(a);"
    assert run(body, [mx.ones(8)], grid=8, header=header)[0].tolist() == [1.0] * 8
    # MLX passes fewer than eight elements as constant memory.
    with pytest.raises(StandInError, match="does not compile"):
        run(body, [mx.ones(7)], grid=7, header=header)


def test_half_and_bfloat_round_as_their_formats_do() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)
    edges = [0.0, 65504, 65519.99, 65520, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 1e-40, np.inf]
    values = np.concatenate([bits.view(np.float32), np.array(edges + [-e for e in edges], "f4")])
    values = values[~np.isnan(values)]
    for dtype, name in ((mx.float16, "half"), (mx.bfloat16, "bfloat")):
        body = f"{INDEX} out[i] = {name}(a[i]);"
        result, _ = run(body, [mx.array(values)], grid=values.size, out=dtype)
        right = mx.array(values).astype(dtype)
        assert (np.array(result.view(mx.uint16)) == np.array(right.view(mx.uint16))).all(), name


def test_every_half_widens_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    result, _ = run(f"{INDEX} out[i] = a[i];", [mx.array(halves)], grid=65536)
    assert np.array_equal(np.array(result), halves.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["half", "bfloat"])
@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
def test_small_float_arithmetic_is_rounded_once(operator: str, dtype: mx.Dtype) -> None:
    left = (mx.random.normal((4096,), key=mx.random.key(0)) * 30).astype(dtype)
    right = (mx.random.normal((4096,), key=mx.random.key(1)) * 30).astype(dtype)
    result, _ = run(f"{INDEX} out[i] = a[i] {operator} b[i];", [left, right], grid=4096, out=dtype)
    wide = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operator](
        np.array(left.astype(mx.float32), "f8"), np.array(right.astype(mx.float32), "f8")
    )
    assert result.tolist() == mx.array(wide.astype(np.float32)).astype(dtype).tolist()


def test_no_conversion_to_a_small_float_is_silent() -> None:
    with pytest.raises(StandInError, match="does not compile"):
        run(f"{INDEX} float x = a[i]; bfloat y = x; out[i] = y;", [mx.ones(64)])


def test_fmax_and_fmin_pass_over_nan() -> None:
    body = f"{INDEX} out[i] = i < 32 ? fmax(a[i], 1.0f) : fmin(1.0f, a[i]);"
    assert run(body, [mx.full((64,), float("nan"))])[0].tolist() == [1.0] * 64


def test_denormals_are_flushed_on_request() -> None:
    body = f"{INDEX} out[i] = a[i] * 0.5f;"
    tiny = [mx.full((64,), 1e-40)]
    assert run(body, tiny)[0][0].item() > 0
    if stand_in.flushes_denormals():
        assert run(body, tiny, flush_denormals=True)[0][0].item() == 0


def test_a_register_nobody_set_does_not_compile() -> None:
    with pytest.raises(StandInError, match="uninitialized"):
        run(f"{INDEX} float x; out[i] = x + a[i];", [mx.ones(64)])


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(StandInError, match=r"need a C\+\+ compiler .* apt-get install g\+\+"):
        stand_in.compiler()


def test_kernels_outside_the_context_are_mlx_s_own() -> None:
    with StandIn():
        pass
    kernel = mx.fast.metal_kernel(
        name="probe", input_names=[], output_names=["out"], source="out[0] = 0;"
    )
    with pytest.raises(RuntimeError, match="No Metal"):
        kernel(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
