"""Whether a step's time and memory follow the cache's capacity, or only what is in it.

    python -m bench.cache_cost

decodes with a tiny random model whose cache holds the same few tokens in rooms of 1k and of 64k
tokens. For contrast it does so once more while somebody keeps a reference to the cache's arrays,
which makes MLX copy them at every step. Writes bench/results/cache_cost.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from bench.common import RESULTS
from mlxspec import StaticShapeEngine
from mlxspec.benchmark import markdown_table, provenance, write_json

SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 131_072,
}
CAPACITIES = (1024, 65_536)
WIDTHS = (1, 8)
FILL = 500


@dataclass
class Case:
    """One row of the table.

    Attributes:
        engine: Holds the cache.
        capacity: Tokens the cache has room for, without what a tile's padding needs.
        rows: Rows of a step.
        reference_kept: Whether the cache's arrays have a second owner.
        seconds: Time of each step.
        extra_bytes: Most memory each step took beyond what was there before it.
    """

    engine: StaticShapeEngine
    capacity: int
    rows: int
    reference_kept: bool
    seconds: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)

    def step(self) -> None:
        """Verify one block and take it back."""
        # The engine's own list is the only owner unless we become a second one.
        kept = list(self.engine._state.slots) if self.reference_kept else []
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        begin = time.perf_counter()
        self.engine.verify(range(self.rows))
        self.seconds.append(time.perf_counter() - begin)
        self.extra_bytes.append(mx.get_peak_memory() - before)
        del kept
        self.engine.reset(FILL)

    def result(self) -> Cost:
        """Sum up what was measured."""
        return Cost(
            capacity=self.capacity,
            rows=self.rows,
            reference_kept=self.reference_kept,
            step_ms=statistics.median(self.seconds) * 1e3,
            cache_mb=sum(array.nbytes for array in self.engine._state.slots) / 1e6,
            extra_mb=max(self.extra_bytes) / 1e6,
        )


@dataclass(frozen=True)
class Cost:
    """What is known of a case: the median step in ms, sizes in MB."""

    capacity: int
    rows: int
    reference_kept: bool
    step_ms: float
    cache_mb: float
    extra_mb: float


def main() -> None:
    """Measure all cases in turns and write down what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of each case")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "cache_cost", help="results without their ending"
    )
    arguments = parser.parse_args()
    steps = arguments.steps
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(SHAPE))
    engines = {capacity: filled_engine(model, capacity) for capacity in CAPACITIES}
    cases = [
        Case(engine, capacity, rows, kept)
        for rows in WIDTHS
        for kept in (False, True)
        for capacity, engine in engines.items()
    ]
    for case in cases:
        case.step()
        case.seconds.clear()
        case.extra_bytes.clear()
    for _ in range(steps):
        for case in cases:
            case.step()
    costs = [case.result() for case in cases]
    table = markdown_table(
        ("room for", "rows", "cache, MB", "its arrays have", "step, ms", "extra memory, MB"),
        [
            (
                f"{cost.capacity:,} tokens",
                cost.rows,
                f"{cost.cache_mb:.0f}",
                "a second owner" if cost.reference_kept else "one owner",
                f"{cost.step_ms:.2f}",
                f"{cost.extra_mb:.1f}",
            )
            for cost in costs
        ],
    )
    ratios = {rows: step_ratio(costs, rows) for rows in WIDTHS}
    lines = [
        f"{rows} row{'s' * (rows > 1)}: a step takes {ratio:.2f}x as long in the larger room."
        for rows, ratio in ratios.items()
    ]
    text = "\n".join([table, "", *lines])
    print(text)
    data = {"model": SHAPE, "tokens_in_cache": FILL, "steps": steps}
    data |= {"costs": [asdict(cost) for cost in costs], "step_ratio_by_rows": ratios}
    write_json(arguments.output.with_suffix(".json"), provenance() | data)
    arguments.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def filled_engine(model: nn.Module, capacity: int) -> StaticShapeEngine:
    """An engine with room for `capacity` tokens, `FILL` of them there."""
    engine = StaticShapeEngine(model, tile_widths=WIDTHS, initial_capacity=capacity)
    engine.prefill([token % SHAPE["vocab_size"] for token in range(FILL)])
    return engine


def step_ratio(costs: list[Cost], rows: int) -> float:
    """Step time in the largest room over that in the smallest, one owner each."""
    times = {c.capacity: c.step_ms for c in costs if c.rows == rows and not c.reference_kept}
    return times[max(times)] / times[min(times)]


if __name__ == "__main__":
    main()
