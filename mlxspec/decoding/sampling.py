"""Seeded sampling as a pure function of (row of logits, seed, position, purpose).

A token is drawn by the Gumbel-max trick: argmax(filtered log-probabilities / T + noise). The noise
of a position is the same in whichever row, tile or round the position is scored, so the same seed
gives the same text whatever is drafted (Daliri, Musco, Suresh, "Coupling without communication and
drafter-invariant speculative decoding", 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlxspec.numbers import LEAST_TEMPERATURE, real_number, whole_number

MAX_SEED = 2**64 - 1
# The largest value of every real option, and the least of every whole one.
_REAL_OPTIONS = {
    "temp": math.inf,
    "top_p": 1.0,
    "min_p": 1.0,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.5,
}
_WHOLE_OPTIONS = {"top_k": 0, "min_tokens_to_keep": 1}


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes at one position are independent."""

    TOKEN = 0
    XTC = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters: names, defaults and meanings of mlx-lm's `make_sampler`.

    The filters see log-probabilities before the temperature, in mlx-lm's order: top-p, min-p, XTC,
    top-k. All but XTC are mlx-lm's own functions; its XTC draws from the global generator, ours
    from (seed, position).

    Attributes:
        temp: Temperature; 0 takes the largest logit and ignores the rest.
        top_p: Keep the most probable tokens that together reach this; 0 or 1 keeps all.
        min_p: Keep tokens with at least this share of the largest probability; 0 keeps all.
        min_tokens_to_keep: Fewest tokens that min-p leaves.
        top_k: Keep this many; 0 keeps all.
        xtc_probability: How often XTC is applied.
        xtc_threshold: Of the tokens above this probability XTC keeps only the least.
        xtc_special_tokens: Ids that XTC leaves alone.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "xtc_special_tokens", tuple(self.xtc_special_tokens or ()))
        for name, most in _REAL_OPTIONS.items():
            object.__setattr__(self, name, real_number(name, getattr(self, name), 0.0, most))
        for name, least in _WHOLE_OPTIONS.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if 0 < self.temp < LEAST_TEMPERATURE:
            raise ValueError(
                f"temp: expected 0 (greedy) or at least {LEAST_TEMPERATURE:g}, below which the "
                f"scores overflow, got {self.temp!r}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temp == 0

    def __call__(self, logits: mx.array, positions: mx.array, noise_key: mx.array) -> mx.array:
        """Score every token so that the largest score is the token drawn.

        Args:
            logits: [rows, vocab] in the model's dtype.
            positions: int32 [rows], the position that each row's token will have.
            noise_key: uint32 [2], see `noise_key`.

        Returns:
            float32 [rows, vocab]; -inf for what the filters removed.
        """
        keys = row_keys(noise_key, positions, Purpose.TOKEN)
        noise = mx.vmap(lambda key: mx.random.gumbel((logits.shape[-1],), key=key))(keys)
        return self.tempered(logits, positions, noise_key) + noise

    def tempered(self, logits: mx.array, positions: mx.array, noise_key: mx.array) -> mx.array:
        """Filtered log-probabilities over the temperature: the softmax is the distribution.

        Args and shapes as in `__call__`; float32 [rows, vocab], not normalised.
        """
        cleaned = mx.where(mx.isnan(logits), mx.array(-math.inf, logits.dtype), logits)
        logprobs = cleaned - mx.logsumexp(cleaned, axis=-1, keepdims=True)
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            logprobs = self._without_top_choices(logprobs, positions, noise_key)
        if self.top_k > 0:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs.astype(mx.float32) * (1 / self.temp)

    def _without_top_choices(
        self, logprobs: mx.array, positions: mx.array, noise_key: mx.array
    ) -> mx.array:
        """XTC ("exclude top choices"), as in mlx-lm but for the source of its draws."""
        probabilities = mx.softmax(logprobs, axis=-1)
        above = mx.where(probabilities > self.xtc_threshold, probabilities, mx.inf)
        excluded = probabilities > above.min(axis=-1, keepdims=True)
        # MLX writes past a row without a word, and end tokens of some configs lie there.
        special = [token for token in self.xtc_special_tokens if 0 <= token < excluded.shape[-1]]
        if special:
            excluded[..., special] = False
        applies = uniform(noise_key, positions, Purpose.XTC) <= self.xtc_probability
        return mx.where(applies[:, None] & excluded, -mx.inf, logprobs)


def noise_key(seed: int) -> mx.array:
    """The key of a seed, uint32 [2]; all 64 bits of the seed go into all of it.

    Raises:
        ValueError: The seed is not a whole number from 0 to 2**64 - 1.
    """
    seed = whole_number("seed", seed, 0, MAX_SEED)
    # Hashed once, so that neighbouring seeds do not meet neighbouring positions' keys.
    key = mx.random.split(mx.random.key(seed), 1)[0]
    # Computed here: a graph left to compute belongs to the thread that built it.
    mx.eval(key)
    return key


def row_keys(noise_key: mx.array, positions: mx.array, purpose: Purpose) -> mx.array:
    """One key per row for MLX's generator (Threefry-2x32), uint32 [rows, 2].

    Args:
        noise_key: uint32 [2].
        positions: int32 [rows].
        purpose: What is drawn.
    """
    word = mx.array(int(purpose), mx.uint32)
    place = positions.astype(mx.uint32)
    return mx.stack([noise_key[0] ^ place, mx.broadcast_to(noise_key[1] ^ word, place.shape)], -1)


def uniform(noise_key: mx.array, positions: mx.array, purpose: Purpose) -> mx.array:
    """One number in [0, 1) per row, float32 [rows]; see `row_keys`."""
    keys = row_keys(noise_key, positions, purpose)
    return mx.vmap(lambda key: mx.random.uniform(shape=(), key=key))(keys)
