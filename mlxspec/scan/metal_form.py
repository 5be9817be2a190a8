"""The scan as two dispatches of the project's Metal kernels; `kernels/README.md` explains them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

# Limits the kernels' text sets; a test reads them there.
SIMD_SIZE = 32
MAX_THREADS = 256
THREAD_LOGITS = 16
MAX_TOP_K = 32
MAX_AGREE_ROWS = 256

# What the first pass hands to the second.
_PARTS = ("part_key", "part_index", "part_sum", "part_nan_count")
_PART_DTYPES = (mx.int32, mx.uint32, mx.float32, mx.uint32)
_LISTS = ("list_key", "list_index")


@dataclass(frozen=True)
class SplitShape:
    """How a row is spread over threadgroups.

    Attributes:
        length: Logits a threadgroup reads; the last one of a row may get fewer.
        threads: Threads of a threadgroup, a multiple of 32.
        count: Threadgroups a row.
    """

    length: int
    threads: int
    count: int

    def __post_init__(self) -> None:
        if self.threads % SIMD_SIZE or not SIMD_SIZE <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 32, 64, ... {MAX_THREADS}, got {self.threads}.")
        if not 1 <= self.length <= self.threads * THREAD_LOGITS:
            raise ValueError(
                f"a split of {self.threads} threads holds 1 to {self.threads * THREAD_LOGITS} "
                f"logits, got {self.length}."
            )
        if self.count < 1:
            raise ValueError(f"a row needs at least one split, got {self.count}.")

    @classmethod
    def covering(cls, vocab: int, length: int, threads: int) -> SplitShape:
        """Cover `vocab` logits with splits of `length`."""
        return cls(length=length, threads=threads, count=-(-vocab // length))


@dataclass(frozen=True)
class KernelScan:
    """What the two dispatches leave; shapes and dtypes as in `RowScan`.

    Attributes:
        agreement: [4] uint32 as `LogitRowScan.agreement` describes, or None without a draft.
    """

    argmax: mx.array
    maximum: mx.array
    logsumexp: mx.array
    nan_count: mx.array
    top_values: mx.array | None
    top_indices: mx.array | None
    agreement: mx.array | None


def default_split(vocab: int) -> SplitShape:
    """Choose the launch shape of a vocabulary.

    It hangs on the vocabulary alone and not on the rows, so that a row's log-sum-exp, whose last
    bits depend on the split, is the same in a tile of any width.
    """
    return SplitShape.covering(vocab, MAX_THREADS * THREAD_LOGITS, MAX_THREADS)


def kernel_folder() -> Path:
    """Find the Metal sources: inside an installed package, or at the top of a checkout.

    Raises:
        FileNotFoundError: Neither place has them.
    """
    packaged = Path(str(files("mlxspec"))) / "kernels"
    checkout = Path(__file__).resolve().parents[2] / "kernels"
    for folder in (packaged, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"The Metal kernels are neither in {packaged} nor in {checkout}. Reinstall mlxspec."
    )


def kernel_text(name: str) -> str:
    """Read `<name>.metal`."""
    return (kernel_folder() / f"{name}.metal").read_text(encoding="utf-8")


@cache
def _kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    headers: tuple[str, ...] = ("logit_row_common",),
) -> Any:
    """Build a kernel once; MLX makes a variant, with a name of its own, per template."""
    return mx.fast.metal_kernel(
        name=f"mlxspec_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=kernel_text(name),
        header="".join(kernel_text(header) for header in headers),
        # The kernels index rows densely. MLX copies whatever is not laid out so.
        ensure_row_contiguous=True,
    )


@lru_cache(maxsize=256)
def _constant(values: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Make a small input once, evaluated: a lazy one would be recomputed by every compiled call."""
    constant = mx.array(values, dtype)
    mx.eval(constant)
    return constant


def scan_rows(
    logits: mx.array,
    *,
    cap: float | None = None,
    top_k: int = 0,
    draft: mx.array | None = None,
    first_row: mx.array | None = None,
    split: SplitShape | None = None,
) -> KernelScan:
    """Scan rows on the GPU, reading each logit once.

    Args:
        logits: [rows, vocab]; float32, float16 or bfloat16. Copied by MLX if not contiguous.
        cap: The final soft cap, or None.
        top_k: 0 to 32, and at most vocab.
        draft: [rows] int32, the token guessed to follow each row, negative for none; or None.
        first_row: [1] uint32, where the block starts in the rows; needed with `draft`.
        split: Another launch shape than the usual one. The indices, the maximum, the NaN count
            and the list are the same for every legal one.

    Returns:
        The scan, from two dispatches.

    Raises:
        ValueError: `top_k`, the split or the number of rows is beyond what the kernels hold.
        RuntimeError: From MLX, where there is no Metal.
    """
    rows, vocab = logits.shape
    if not 0 <= top_k <= min(MAX_TOP_K, vocab):
        raise ValueError(f"top_k must be 0 to {min(MAX_TOP_K, vocab)}, got {top_k}.")
    if draft is not None and rows > MAX_AGREE_ROWS:
        raise ValueError(f"a draft is compared over at most {MAX_AGREE_ROWS} rows, got {rows}.")
    split = split or default_split(vocab)
    if split.length * split.count < vocab:
        raise ValueError(f"{split} does not cover {vocab} logits.")

    listed = top_k > 0
    list_shape = (_device_size(rows * split.count * top_k),)
    parts = _kernel(
        "logit_row_scan",
        ("logits", "cap", "dims"),
        (*_PARTS, *_LISTS),
    )(
        inputs=[
            logits,
            mx.array(1.0 if cap is None else cap, logits.dtype),
            _constant((vocab, split.length, split.count, top_k), mx.uint32),
        ],
        template=[("T", logits.dtype), ("CAPPED", cap is not None), ("TOP", listed)],
        grid=(split.count * split.threads, rows, 1),
        threadgroup=(split.threads, 1, 1),
        output_shapes=[(_device_size(rows * split.count),)] * 4 + [list_shape] * 2,
        output_dtypes=[*_PART_DTYPES, mx.int32, mx.uint32],
    )
    return _combine(
        parts, (rows, vocab, split.count, top_k), logits.dtype, draft=draft, first_row=first_row
    )


def sample_rows(
    logits: mx.array,
    keys: mx.array,
    temperature: float,
    *,
    cap: float | None = None,
    split: SplitShape | None = None,
) -> KernelScan:
    """Choose argmax(logits / temperature + Gumbel noise) in each row, storing no noise.

    Args:
        logits: [rows, vocab]; float32, float16 or bfloat16. Copied by MLX if not contiguous.
        keys: [rows, 2] uint32, the key of each row's noise; drawn as by `mx.random.gumbel`.
        temperature: Above 0.
        cap: The final soft cap, or None.
        split: Another launch shape than the usual one, in pairs of logits.

    Returns:
        The scan of the noisy rows, but for its log-sum-exp, which has no meaning; from two
        dispatches.

    Raises:
        ValueError: The split does not cover the row.
        RuntimeError: From MLX, where there is no Metal.
    """
    rows, vocab = logits.shape
    pairs = -(-vocab // 2)
    split = split or default_split(pairs)
    if split.length * split.count < pairs:
        raise ValueError(f"{split} does not cover {pairs} pairs of logits.")
    parts = _kernel(
        "sampled_row_scan",
        ("logits", "keys", "cap", "temperature", "dims"),
        _PARTS,
        headers=("logit_row_common", "threefry"),
    )(
        inputs=[
            logits,
            keys,
            mx.array(1.0 if cap is None else cap, logits.dtype),
            mx.array(temperature, mx.float32),
            _constant((vocab, split.length, split.count), mx.uint32),
        ],
        template=[("T", logits.dtype), ("CAPPED", cap is not None)],
        grid=(split.count * split.threads, rows, 1),
        threadgroup=(split.threads, 1, 1),
        output_shapes=[(_device_size(rows * split.count),)] * 4,
        output_dtypes=list(_PART_DTYPES),
    )
    no_list = [_constant((0,), mx.int32), _constant((0,), mx.uint32)]
    return _combine([*parts, *no_list], (rows, vocab, split.count, 0), mx.float32)


def _combine(
    parts: list[mx.array],
    dims: tuple[int, int, int, int],
    dtype: mx.Dtype,
    *,
    draft: mx.array | None = None,
    first_row: mx.array | None = None,
) -> KernelScan:
    """Put the parts of each row together: the second dispatch; `dtype` is that of the keys."""
    rows, _, splits, top_k = dims
    listed, agree = top_k > 0, draft is not None
    threads = min(rows * SIMD_SIZE, MAX_THREADS)
    groups = 1 if agree else -(-rows * SIMD_SIZE // threads)
    top_shape = (rows, max(top_k, 1))
    argmax, maximum, logsumexp, nan_count, top_values, top_indices, agreement = _kernel(
        "logit_row_combine",
        (*_PARTS, *_LISTS, "draft", "first_row", "dims"),
        (
            *("argmax", "maximum", "logsumexp", "nan_count", "top_value", "top_index"),
            "agreement",
        ),
    )(
        inputs=[
            *parts,
            _constant((-1,), mx.int32) if draft is None else draft.astype(mx.int32),
            _constant((0,), mx.uint32) if first_row is None else first_row.astype(mx.uint32),
            _constant(dims, mx.uint32),
        ],
        template=[
            ("T", dtype),
            ("TOP", listed),
            ("LISTS", -(-splits // SIMD_SIZE) if listed else 1),
            ("AGREE", agree),
        ],
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows,)] * 4 + [top_shape] * 2 + [(4,)],
        output_dtypes=[
            *(mx.uint32, mx.float32, mx.float32, mx.uint32, mx.float32, mx.uint32),
            mx.uint32,
        ],
    )
    return KernelScan(
        argmax=argmax,
        maximum=maximum,
        logsumexp=logsumexp,
        nan_count=nan_count,
        top_values=top_values if listed else None,
        top_indices=top_indices if listed else None,
        agreement=agreement if agree else None,
    )


def _device_size(count: int) -> int:
    """Size an intermediate buffer so that MLX passes it as device memory.

    Fewer than 8 elements go to constant memory, which would be another kernel to compile.
    """
    return max(count, 8)
