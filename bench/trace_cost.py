"""What tracing costs against what it saves: rules for the span buckets, by measured parts.

    python -m bench.trace_cost --openblas

measures how a step's time grows with its span, on a real model, and how long a tile takes to trace,
on a model of the same layers with tiny weights: tracing sees no weights, and the difference between
a first and a later call is not lost in the step. From these parts it adds up generations under
several rules: every new bucket costs a trace per tile width in use, every slot past a row's
position is work for nothing. Writes bench/results/trace_cost.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.nn as nn
from mlx_lm.models import llama

import mlxspec
from bench import openblas
from bench.common import RESULTS
from mlxspec import Capture, StaticShapeEngine
from mlxspec.benchmark import markdown_table, provenance, write_json
from mlxspec.engine.spans import SpanRule

SpanOf = Callable[[int], int]

# Their spans lie far apart, so that two steps show what a slot costs.
POSITIONS = (300, 2100)
WIDTHS = (1, 16)
PROMPT_TOKENS = 300
LENGTHS = (200, 2000, 8000)
GOAL = 0.01


@dataclass(frozen=True)
class TileCost:
    """Measured parts of a tile's time, in seconds.

    Attributes:
        width: Rows.
        trace: What its first call takes beyond a later one.
        step: A call that attends to no slot, extrapolated.
        slot: What one more slot adds to a call.
    """

    width: int
    trace: float
    step: float
    slot: float


@dataclass(frozen=True)
class Sum:
    """A generation under a rule.

    Attributes:
        rule: The rule's name.
        tokens: Tokens generated after `PROMPT_TOKENS` of prompt.
        width: Rows of its tiles; in a wider tile than 1 every draft is accepted.
        buckets: Spans met.
        tracing: Share of tracing in the whole time, with this width and width 1 in use.
        waste: Share of attending to slots past the newest row.
        least_step_ms: Step time from which on tracing stays under `GOAL`, all else equal: what a
            faster machine has to be compared with.
    """

    rule: str
    tokens: int
    width: int
    buckets: int
    tracing: float
    waste: float
    least_step_ms: float


RULES: dict[str, SpanOf] = {
    "fixed 256": lambda position: (position // 256 + 1) * 256,
    "doubling from 256": lambda position: max(256, 1 << position.bit_length()),
    "SpanRule(64)": SpanRule(64).span,
    "SpanRule(128)": SpanRule(128).span,
    "SpanRule(256)": SpanRule(256).span,
}


def main() -> None:
    """Measure the parts, add them up, and write down what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trace_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2:f32", help="%(default)s by default")
    parser.add_argument("--openblas", action="store_true", help="see bench/openblas.py")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed at each place")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "trace_cost", help="results without their ending"
    )
    arguments = parser.parse_args()
    if arguments.openblas:
        openblas.run_again_with_openblas("bench.trace_cost", sys.argv[1:])
    blas = openblas.proof() if arguments.openblas else "the wheel's own"
    model, _ = mlxspec.load(arguments.model)
    costs = measured(model, arguments.repeats)
    sums = [
        add_up(name, rule, tokens, cost, costs[0])
        for tokens in LENGTHS
        for cost in costs
        for name, rule in RULES.items()
    ]
    text = page(costs, sums)
    print(text)
    data = {"model": arguments.model, "blas": blas, "prompt_tokens": PROMPT_TOKENS}
    data |= {"tiles": [asdict(cost) for cost in costs], "sums": [asdict(one) for one in sums]}
    write_json(arguments.output.with_suffix(".json"), provenance() | data)
    arguments.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def measured(model: nn.Module, repeats: int) -> list[TileCost]:
    """The cost of a tile of each width."""
    traces = trace_times(same_layers(model), repeats)
    steps = step_times(model, repeats)
    near, far = (SpanRule().span(position) for position in POSITIONS)
    costs = []
    for width in WIDTHS:
        at_near, at_far = steps[width]
        slot = (at_far - at_near) / (far - near)
        costs.append(TileCost(width, traces[width], at_near - slot * near, slot))
    return costs


def same_layers(model: nn.Module) -> nn.Module:
    """A model that is traced as this one is, with tiny weights. Llama's family only."""
    args = model.args
    tiny = {"hidden_size": 8 * args.num_attention_heads, "head_dim": 8, "intermediate_size": 16}
    small = llama.Model(replace(args, vocab_size=64, **tiny))
    small.set_dtype(model.layers[0].input_layernorm.weight.dtype)
    return small


def trace_times(model: nn.Module, repeats: int) -> dict[int, float]:
    """Seconds that a first call takes beyond a later one, by width: medians over fresh engines."""
    found: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(repeats + 1):
        engine = StaticShapeEngine(model, tile_widths=WIDTHS)
        for width in WIDTHS:
            first = call(engine, width)
            later = min(call(engine, width) for _ in range(5))
            # The first engine's calls compile the fused kernels, which MLX keeps on disk.
            if repeat:
                found[width].append(first - later)
    return {width: statistics.median(times) for width, times in found.items()}


def step_times(model: nn.Module, repeats: int) -> dict[int, list[float]]:
    """Seconds of a settled call at each of `POSITIONS`, by width: the fastest of all."""
    engine = StaticShapeEngine(model, tile_widths=WIDTHS)
    found: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for position in POSITIONS:
        before = engine.processed_token_count
        engine.prefill([token % engine.vocab_size for token in range(before, position)])
        for width in WIDTHS:
            call(engine, width)
            found[width].append(min(call(engine, width) for _ in range(repeats)))
    return found


def call(engine: StaticShapeEngine, width: int) -> float:
    """Seconds of one forward of `width` rows, which is taken back afterwards."""
    position = engine.processed_token_count
    begin = time.perf_counter()
    engine.verify([0] * width, Capture(logits=True))
    seconds = time.perf_counter() - begin
    engine.reset(position)
    return seconds


def add_up(name: str, rule: SpanOf, tokens: int, cost: TileCost, plain: TileCost) -> Sum:
    """A generation in which every forward brings as many tokens as it has rows."""
    starts = range(PROMPT_TOKENS, PROMPT_TOKENS + tokens, cost.width)
    spans = [rule(start) for start in starts]
    buckets = len(set(spans))
    traces = cost.trace if cost is plain else cost.trace + plain.trace
    tracing = buckets * traces
    steps = sum(cost.step + cost.slot * span for span in spans)
    waste = sum(
        cost.slot * (span - start - cost.width)
        for span, start in zip(spans, starts, strict=True)
        if span > start + cost.width
    )
    return Sum(
        rule=name,
        tokens=tokens,
        width=cost.width,
        buckets=buckets,
        tracing=tracing / (tracing + steps),
        waste=waste / (tracing + steps),
        least_step_ms=tracing / GOAL / len(starts) * 1e3,
    )


def page(costs: list[TileCost], sums: list[Sum]) -> str:
    """The measured parts, the table made of them, and the sentence about the goal."""
    parts = markdown_table(
        ("rows", "trace, ms", "step without slots, ms", "1 000 slots more, ms"),
        [
            (c.width, f"{c.trace * 1e3:.1f}", f"{c.step * 1e3:.1f}", f"{c.slot * 1e6:.1f}")
            for c in costs
        ],
    )
    table = markdown_table(
        ("tokens", "rows", "rule", "buckets", "tracing", "waste", "both", "tracing < 1 % from"),
        [
            (
                one.tokens,
                one.width,
                one.rule,
                one.buckets,
                f"{one.tracing:.2%}",
                f"{one.waste:.2%}",
                f"{one.tracing + one.waste:.2%}",
                f"{one.least_step_ms:.1f} ms a step",
            )
            for one in sums
        ],
    )
    ours = next(
        one for one in sums if one.rule == "SpanRule(256)" and one.tokens == 2000 and one.width == 1
    )
    verdict = "under" if ours.tracing < GOAL else "not under"
    sentence = (
        f"Plain decoding of 2 000 tokens with the engine's rule spends {ours.tracing:.2%} on "
        f"tracing: {verdict} 1 %."
    )
    return f"{parts}\n\n{table}\n\n{sentence}"


if __name__ == "__main__":
    main()
