"""The scan in MLX's own operations, for every backend without the Metal kernel.

A row is compared through integers: the bits of a float, folded so that their order is the order
of the values, with -0.0 on 0.0 and NaN on -inf. That makes the choice independent of what the
backend's float comparison does with NaN and denormals (MLX's argmax changed its NaN rule between
releases), and on CPU it is faster than an argmax over the floats.
"""

from __future__ import annotations

import mlx.core as mx

# Per dtype: the signed integer of its width, and the bits of +inf.
_INTEGER_FORMAT: dict[mx.Dtype, tuple[mx.Dtype, int]] = {
    mx.float32: (mx.int32, 0x7F800000),
    mx.float16: (mx.int16, 0x7C00),
    mx.bfloat16: (mx.int16, 0x7F80),
}

# Divides the vocabularies of most models, and keeps both levels of a 262 144-entry sum short.
_SUM_BLOCK = 128


def soft_cap(logits: mx.array, cap: float) -> mx.array:
    """Cap logits as mlx-lm's models do: three operations, each rounded to the logits' dtype.

    Source: `tanh(x / cap) * cap` in gemma2, gemma3n, gemma4_text of mlx-lm 0.32.2.

    Args:
        logits: [rows, vocab]; float32, float16 or bfloat16.
        cap: The model's `final_logit_softcapping`; MLX rounds it to the logits' dtype.

    Returns:
        [rows, vocab] in the dtype of the logits.
    """
    return mx.tanh(logits / cap) * cap


@mx.compile
def _order_keys(values: mx.array) -> mx.array:
    """Map floats to signed integers of the same width and order; NaN maps to where -inf does."""
    integer, infinity = _INTEGER_FORMAT[values.dtype]
    bits = values.view(integer)
    # The sign bit is the integer's minimum; what is left of the bits orders the magnitudes.
    magnitude = bits & mx.array(mx.iinfo(integer).max, integer)
    keys = mx.where(bits < mx.array(0, integer), -magnitude, magnitude)
    is_nan = magnitude > mx.array(infinity, integer)
    return mx.where(is_nan, mx.array(-infinity, integer), keys)


@mx.compile
def first_maximum(values: mx.array) -> mx.array:
    """Find the first maximum of each row.

    Args:
        values: [rows, vocab], capped.

    Returns:
        [rows] uint32; 0 for a row of NaN and -inf only.
    """
    return mx.argmax(_order_keys(values), axis=-1)


@mx.compile
def nan_to_lowest(values: mx.array) -> mx.array:
    """Replace NaN by -inf; shape and dtype stay."""
    return mx.where(mx.isnan(values), mx.array(-float("inf"), values.dtype), values)


@mx.compile
def row_logsumexp(values: mx.array) -> mx.array:
    """Log of the sum of exponentials of each row without its NaNs, accumulated in float32.

    The row is summed in blocks and the blocks' results once more: one running float32 sum over
    262 144 terms, as MLX's CPU reduction makes it, is wrong in the sixth digit.

    Args:
        values: [rows, vocab], capped.

    Returns:
        [rows] float32; -inf for a row of NaN and -inf only.
    """
    rows, vocab = values.shape
    cleaned = nan_to_lowest(values).astype(mx.float32)
    missing = -vocab % _SUM_BLOCK
    if missing:
        cleaned = mx.pad(cleaned, [(0, 0), (0, missing)], constant_values=-float("inf"))
    blocks = mx.logsumexp(cleaned.reshape(rows, -1, _SUM_BLOCK), axis=-1)
    return mx.logsumexp(blocks, axis=-1)


@mx.compile
def count_nan(values: mx.array) -> mx.array:
    """Count the NaNs of each row: [rows, vocab] -> [rows] uint32."""
    return mx.isnan(values).sum(axis=-1).astype(mx.uint32)


def value_at(values: mx.array, indices: mx.array) -> mx.array:
    """Read each row at its own indices: [rows, vocab], [rows, n] -> [rows, n] float32, NaN -inf."""
    return nan_to_lowest(mx.take_along_axis(values, indices, axis=-1)).astype(mx.float32)


def largest(values: mx.array, top_k: int) -> mx.array:
    """List where each row's largest entries stand, by (value descending, index ascending).

    Value and index are packed into one 64-bit key, so that no two keys are equal and the order of
    ties does not hang on the backend's partition and sort.

    Args:
        values: [rows, vocab], capped.
        top_k: At least 1 and at most vocab.

    Returns:
        [rows, top_k] uint32.
    """
    vocab = values.shape[-1]
    countdown = mx.arange(vocab - 1, -1, -1, dtype=mx.int64)
    keys = _order_keys(values).astype(mx.int64) * (1 << 32) + countdown
    if top_k < vocab:
        keys = mx.partition(keys, vocab - top_k, axis=-1)[:, vocab - top_k :]
    ascending = mx.sort(keys, axis=-1)
    return (vocab - 1 - (ascending[:, ::-1] & 0xFFFFFFFF)).astype(mx.uint32)


def agreement(
    argmax: mx.array, nan_count: mx.array, vocab: int, draft: mx.array, first_row: mx.array
) -> mx.array:
    """Count how many draft tokens the rows confirm, from the row where the block starts.

    Args:
        argmax: [rows] uint32.
        nan_count: [rows] uint32.
        vocab: Width of a row.
        draft: [rows] integers, the token guessed to follow each row; negative for none.
        first_row: [1] integer.

    Returns:
        [4] uint32, the fields of `row_scan.Agreement` in order.
    """
    rows = argmax.shape[0]
    row = mx.arange(rows, dtype=mx.int32)
    first = first_row.astype(mx.int32)
    confirmed = (argmax.astype(mx.int32) == draft.astype(mx.int32)) & (row < rows - 1)
    run = mx.cumprod(((row < first) | confirmed).astype(mx.int32), axis=0)
    accepted = mx.sum(mx.where(row < first, 0, run), keepdims=True)
    last = first + accepted
    used = (row >= first) & (row <= last)
    nans = mx.sum(mx.where(used, nan_count, mx.array(0, mx.uint32)), keepdims=True)
    empty = used & (nan_count == vocab)
    return mx.concatenate(
        [
            accepted.astype(mx.uint32),
            mx.take(argmax, last),
            nans.astype(mx.uint32),
            mx.min(mx.where(empty, row, rows), keepdims=True).astype(mx.uint32),
        ]
    )


def gumbel_noise(keys: mx.array, vocab: int) -> mx.array:
    """Draw Gumbel noise row by row: [rows, 2] uint32 -> [rows, vocab] float32.

    A row's noise hangs on its own key alone, not on the rows beside it.
    """
    return mx.vmap(lambda key: mx.random.gumbel((vocab,), key=key))(keys)


def noisy(values: mx.array, keys: mx.array, temperature: float) -> mx.array:
    """Add a row's noise to its tempered logits: [rows, vocab] -> [rows, vocab] float32."""
    return values.astype(mx.float32) / temperature + gumbel_noise(keys, values.shape[-1])
