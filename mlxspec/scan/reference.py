"""The meaning of the scan, in plain NumPy: every other form is compared with this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DtypeName = Literal["float32", "float16", "bfloat16"]
Float32Rows = NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceScan:
    """What `reference_scan` found, row by row.

    Attributes:
        argmax: [rows] uint32, index of the first maximum; 0 where a row holds nothing above -inf.
        maximum: [rows] float32, the value there.
        logsumexp: [rows] float64, over the capped row without its NaNs; -inf for an empty row.
        nan_count: [rows] uint32, how many entries are NaN.
        top_values: [rows, k] float32 in order (value descending, index ascending).
        top_indices: [rows, k] uint32, where those values stand.
    """

    argmax: NDArray[np.uint32]
    maximum: Float32Rows
    logsumexp: NDArray[np.float64]
    nan_count: NDArray[np.uint32]
    top_values: Float32Rows
    top_indices: NDArray[np.uint32]


def round_to(values: NDArray[np.floating], dtype: DtypeName) -> Float32Rows:
    """Round to the nearest value of `dtype`, ties to even, and hold the result in float32.

    A quotient or product of two 16-bit values rounded to float32 and then to 16 bits equals the
    value rounded once: float32 carries more than twice the digits plus two (Figueroa, "When is
    double rounding innocuous?", 1995).

    Args:
        values: Any shape; float32 or float64.
        dtype: The format to round to.

    Returns:
        The same shape in float32, every entry exact in `dtype`.
    """
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, dtype=np.float32)
        if dtype == "float32":
            return single
        if dtype == "float16":
            return single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    # The carry of the addition would turn some NaNs into infinities.
    return np.where(np.isnan(single), single, rounded.view(np.float32))


def reference_scan(
    logits: NDArray[np.floating],
    dtype: DtypeName = "float32",
    *,
    cap: float | None = None,
    top_k: int = 0,
    tanh: Callable[[Float32Rows], NDArray[np.floating]] = np.tanh,
    log: Callable[[NDArray[np.float64]], NDArray[np.floating]] = np.log,
) -> ReferenceScan:
    """Scan rows of logits by the rules of the project, one plain step after the other.

    The soft cap is `tanh(x / cap) * cap` with each of the three results rounded to `dtype`, which
    is how gemma2, gemma3n and gemma4 of mlx-lm compute it. NaN then counts as -inf.

    Args:
        logits: [rows, vocab]; every entry exact in `dtype`.
        dtype: The format the logits have on the device.
        cap: The final soft cap, or None for a model without one.
        top_k: How many of the largest entries to list; more than vocab lists them all.
        tanh: The hyperbolic tangent of the form under comparison. Maths libraries differ in the
            last place, and on saturated rows that decides the index. Takes and returns [rows,
            vocab]; what it returns is rounded to `dtype`.
        log: The natural logarithm of the form under comparison.

    Returns:
        The scan of every row.
    """
    rows = np.asarray(logits, dtype=np.float32)
    if cap is not None:
        limit = round_to(np.asarray(cap, dtype=np.float64), dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            rows = round_to(rows / limit, dtype)
            rows = round_to(tanh(rows), dtype)
            rows = round_to(rows * limit, dtype)

    is_nan = np.isnan(rows)
    rows = np.where(is_nan, np.float32(-np.inf), rows)
    # Stable, on negated values: equal values stay in the order of their indices.
    order = np.argsort(-rows, axis=-1, kind="stable")
    argmax = order[:, 0]
    maximum = np.take_along_axis(rows, order[:, :1], axis=-1)[:, 0]
    top_indices = order[:, :top_k]

    anchor = np.where(np.isfinite(maximum), maximum, 0).astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        total = np.exp(rows.astype(np.float64) - anchor[:, None]).sum(axis=-1)
        logsumexp = np.asarray(log(total), dtype=np.float64) + anchor

    return ReferenceScan(
        argmax=argmax.astype(np.uint32),
        maximum=maximum,
        logsumexp=logsumexp,
        nan_count=is_nan.sum(axis=-1).astype(np.uint32),
        top_values=np.take_along_axis(rows, top_indices, axis=-1),
        top_indices=top_indices.astype(np.uint32),
    )


def reference_gumbel(keys: NDArray[np.uint32], vocab: int) -> NDArray[np.float64]:
    """Draw Gumbel noise as `mx.random.gumbel` does, one plain step after the other.

    The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011). Index i of a row is drawn together with index
    i + ceil(vocab / 2); the last pair of an odd row counts 0 in its second place.

    Args:
        keys: [rows, 2].
        vocab: Width of a row.

    Returns:
        [rows, vocab]: the noise of the float32 uniform numbers, its logarithms taken in float64.
        -inf where a uniform number is 0.
    """
    bits = np.stack([reference_bits(key, vocab) for key in keys])
    uniform = np.minimum(bits.astype(np.float32) / np.float32(2**32), np.float32(1 - 2**-24))
    with np.errstate(divide="ignore"):
        return -np.log(-np.log(uniform.astype(np.float64)))


def reference_bits(key: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Draw `count` words of random bits from a key [2], in the order of MLX's generator."""
    half = -(-count // 2)
    low = np.arange(half, dtype=np.uint32)
    high = np.where(low + half < count, low + half, 0).astype(np.uint32)
    return np.concatenate(threefry(key, low, high))[:count]


def threefry(
    key: NDArray[np.uint32], low: NDArray[np.uint32], high: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Scramble counters with a key: Threefry-2x32, 20 rounds. Two arrays in, two of that shape."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):
        low, high = low + schedule[0], high + schedule[1]
        for group in range(5):
            for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                low = low + high
                high = ((high << np.uint32(turn)) | (high >> np.uint32(32 - turn))) ^ low
            low = low + schedule[(group + 1) % 3]
            high = high + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return low, high
