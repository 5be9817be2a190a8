"""What it takes to call a family exact: the same ids, and the same rows bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxspec import (
    Capture,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
    SpeculativeEngine,
    StaticShapeEngine,
    VerifyRows,
)
from mlxspec.decoding import Choice, ModelsChoice
from mlxspec.engine.placement import Placement
from mlxspec.engine.support import default_placement
from mlxspec.scan.mlx_form import soft_cap
from tests.hostile import PlannedDrafter

Plan = Sequence[tuple[str, int]]

# An oracle, a drafter that is right half of the time and a wrong one.
PLANS: dict[str, Plan] = {
    "right": [("right", 40)],
    "half right": [("right then wrong", 6), ("empty", 0), ("right then wrong", 3)],
    "wrong": [("wrong", 40)],
}


@dataclass(frozen=True)
class Regime:
    """A ladder and a placement to run a model under."""

    widths: tuple[int, ...]
    placement: Placement

    def __str__(self) -> str:
        return f"{self.placement} {'-'.join(map(str, self.widths))}"


ONE_WIDTH = Regime((8,), "aligned")


def ladder(model: nn.Module, *widths: int) -> Regime:
    """Tiles of several widths, or of one where the model's rows depend on the width.

    Args:
        model: The model.
        *widths: In rows; default 1, 2, 4, 8 and 16.
    """
    placement = default_placement(model)
    return ONE_WIDTH if placement == "aligned" else Regime(widths or (1, 2, 4, 8, 16), placement)


@dataclass(frozen=True)
class Case:
    """A greedy continuation and where it comes from.

    Attributes:
        prompt: Token ids.
        tokens: What mlx-lm says, one argmax of its raw logits after the other.
        rows: Those logits, [len(tokens), vocab].
        own_difference: How far mlx-lm's forward differs from itself when it is given the same
            tokens all at once, or eight at a time; see `Findings`.
    """

    prompt: list[int]
    tokens: list[int]
    rows: np.ndarray
    own_difference: float

    @property
    def text(self) -> list[int]:
        """Prompt and continuation."""
        return self.prompt + self.tokens

    @property
    def context_length(self) -> int:
        """A context in which the continuation ends a few positions before the last."""
        return len(self.text) + 3


@dataclass
class Findings:
    """What was found out about a model under one regime; nothing in `wrong` is fine.

    Attributes:
        wrong: Token ids that differ, and promises about graphs that do not hold.
        stock_difference: Largest difference of a row from mlx-lm's own forward, one token at a
            time under its own caches, as a share of the largest logit; 0 is bit for bit.
        row_difference: The same, of a speculative row from a plain one.
    """

    wrong: list[str] = field(default_factory=list)
    stock_difference: float = 0.0
    row_difference: float = 0.0

    def exact(self, case: Case) -> bool:
        """Whether the promises hold: same ids, same rows whatever was drafted, and mlx-lm's rows.

        A window that has wrapped adds up its keys in another order, and so may a recurrence over
        several rows. There mlx-lm's rows depend on how many tokens it is given, and so far ours
        may differ from them; where mlx-lm's do not, ours are equal bit for bit.
        """
        close = self.stock_difference <= 4 * case.own_difference
        return not self.wrong and not self.row_difference and close


def stock_case(model: nn.Module, prompt_length: int, count: int) -> Case:
    """Continue a random prompt with mlx-lm's forward and caches."""
    caches = make_prompt_cache(model)
    vocab_size = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]
    rng = np.random.default_rng(prompt_length)
    prompt = rng.integers(1, vocab_size - 1, size=prompt_length).tolist()
    if prompt[:-1]:
        model(mx.array([prompt[:-1]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    tokens: list[int] = []
    rows = []
    for _ in range(count):
        row = model(mx.array([[(prompt + tokens)[-1]]]), cache=caches)[0, -1]
        rows.append(_exact(row))
        tokens.append(int(mx.argmax(row).item()))
    stacked = np.stack(rows)
    text = (prompt + tokens)[:-1]
    others = [stock_rows(model, text, step)[-count:] for step in (8, len(text))]
    return Case(prompt, tokens, stacked, max(_difference(other, stacked) for other in others))


def stock_rows(model: nn.Module, tokens: Sequence[int], step: int) -> np.ndarray:
    """mlx-lm's logits after every token, [len(tokens), vocab], taken `step` tokens at a time."""
    caches = make_prompt_cache(model)
    steps = [
        model(mx.array([tokens[begin : begin + step]]), cache=caches)[0]
        for begin in range(0, len(tokens), step)
    ]
    return _exact(mx.concatenate(steps))


def mlx_lm_tokens(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm generates, greedily."""
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in steps]


class RawRows(ModelsChoice):
    """The model's own choice; in place of log-probabilities, the row of logits itself."""

    def choices(
        self,
        rows: VerifyRows,
        draft: Sequence[int],
        position: int,
        draft_scores: mx.array | None = None,
    ) -> Iterator[Choice]:
        """See `Acceptance.choices`."""
        assert rows.logits is not None
        for row, choice in enumerate(super().choices(rows, draft, position, draft_scores)):
            logits = rows.logits[row]
            yield Choice(choice.token, logits if rows.cap is None else soft_cap(logits, rows.cap))


def decode(
    engine: SpeculativeEngine, case: Case, plan: Plan | None = None
) -> tuple[list[int], np.ndarray]:
    """The ids and rows that an engine gives, plainly or with drafts by plan."""
    drafter = None if plan is None else PlannedDrafter(case.text, plan, engine.vocab_size)
    decoder = SpeculativeDecoder(
        engine,
        drafter,
        SpeculativeDecodingOptions(num_draft_tokens=engine.verify_tile_width),
        acceptance=RawRows(with_logprobs=True),
    )
    emissions = list(decoder.generate(case.prompt, max_tokens=len(case.tokens)))
    rows = [_exact(emission.logprobs) for emission in emissions if emission.logprobs is not None]
    return [emission.token for emission in emissions], np.stack(rows)


def examine(model: nn.Module, case: Case, regime: Regime, span_step: int = 16) -> Findings:
    """Run a case plainly, speculatively and with rewinds; spans are short so that many are met."""
    found = Findings()
    engine = StaticShapeEngine(
        model,
        max_context_length=case.context_length,
        tile_widths=regime.widths,
        placement=regime.placement,
        prefill_step_size=32,
        span_step=span_step,
    )

    def compare(what: str, tokens: Sequence[int], expected: Sequence[int]) -> None:
        if list(tokens) != list(expected):
            found.wrong.append(f"{regime}, prompt of {len(case.prompt)}: {what} differs")

    plain, plain_rows = decode(engine, case)
    compare("plain", plain, case.tokens)
    # Rows that follow another token answer another question.
    if plain == case.tokens:
        found.stock_difference = _difference(plain_rows, case.rows)
    for name, plan in {**PLANS, "gone again": None}.items():
        tokens, rows = decode(engine, case, plan)
        compare(f"decoding with a drafter that is {name}", tokens, plain)
        if tokens == plain:
            found.row_difference = max(found.row_difference, _difference(rows, plain_rows))

    _rewind(engine, case, plain_rows, found, compare)

    traces = engine.trace_count
    decode(engine, case, PLANS["half right"])
    if engine.compiled and engine.trace_count != traces:
        found.wrong.append(f"{regime}: a graph that had been traced was traced again")
    return found


def _rewind(engine: StaticShapeEngine, case: Case, plain_rows, found: Findings, compare) -> None:
    """Go back into the middle of blocks, right and wrong ones, all along the continuation."""
    engine.reset(0)
    engine.prefill(case.prompt[:-1])
    cursor = first = len(case.prompt) - 1
    while cursor + 7 < len(case.text):
        rows = engine.verify(case.text[cursor : cursor + 6], Capture(logits=True))
        at = slice(cursor - first, cursor - first + 6)
        compare(f"a block after a rewind to {cursor}", rows.argmax, case.tokens[at])
        if rows.argmax == case.tokens[at] and rows.logits is not None:
            difference = _difference(_exact(rows.logits), plain_rows[at])
            found.row_difference = max(found.row_difference, difference)
        engine.reset(cursor + 3)
        engine.verify([(token + 1) % 97 for token in case.text[cursor + 3 : cursor + 7]])
        # Before the last start only where the layers remember so far back.
        cursor += 2 if engine.allows_rewind(cursor + 2) else 3
        engine.reset(cursor)


def _exact(row: mx.array) -> np.ndarray:
    """Any float dtype of mlx as float32, which holds all of them exactly."""
    return np.array(row.astype(mx.float32))


def _difference(rows: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, as a share of the largest finite logit."""
    unequal = rows != reference
    largest = np.abs(reference[np.isfinite(reference)]).max(initial=1e-9)
    return float(np.abs(rows[unequal] - reference[unequal]).max(initial=0.0) / largest)
