"""What the scan costs: its form here against the MLX operations it replaces, in one run.

    python -m bench.scan_cost

Each pair is measured in turns, so that a change of
the machine's mood meets both. On a Mac the Metal form is timed beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from bench.common import RESULTS
from mlxspec.benchmark import provenance, write_json
from mlxspec.scan import LogitRowScan

SHAPES = ((1, 49_152), (8, 49_152), (1, 262_144), (8, 262_144))
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
CAPS = (None, 30.0)


@dataclass(frozen=True)
class Cost:
    """One comparison; times in milliseconds, the fastest of all turns."""

    dtype: str
    rows: int
    vocab: int
    cap: float | None
    compiled: bool
    form: str
    field: str
    replaced_ms: float
    scan_ms: float

    @property
    def ratio(self) -> float:
        return self.scan_ms / self.replaced_ms


def replaced(cap: float | None, field: str) -> Callable[[mx.array], mx.array]:
    """What the scan takes the place of: the model's own cap, if any, and MLX's operation."""

    def run(x: mx.array) -> mx.array:
        values = x if cap is None else mx.tanh(x / cap) * cap
        if field == "logsumexp":
            return mx.logsumexp(values.astype(mx.float32), axis=-1)
        return mx.argmax(values, axis=-1)

    return run


def scan_field(cap: float | None, form: str, field: str) -> Callable[[mx.array], mx.array]:
    """One field of the scan; the MLX form then computes nothing else."""
    scan = LogitRowScan(cap, form=form)
    return lambda x: getattr(scan(x), field)


def fastest_of_turns(
    functions: tuple[Callable[[mx.array], mx.array], ...], logits: mx.array, turns: int
) -> list[float]:
    """Time functions in turns and keep the fastest of each, in milliseconds."""
    best = [float("inf")] * len(functions)
    for function in functions:
        mx.eval(function(logits))
    for _ in range(turns):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            mx.eval(function(logits))
            best[i] = min(best[i], time.perf_counter() - start)
    return [seconds * 1e3 for seconds in best]


def measure(turns: int) -> list[Cost]:
    """Time every shape, dtype and cap, eager and compiled."""
    form = "metal" if mx.metal.is_available() else "mlx"
    costs = []
    for dtype in DTYPES:
        for rows, vocab in SHAPES:
            logits = (mx.random.normal((rows, vocab), key=mx.random.key(0)) * 4).astype(dtype)
            mx.eval(logits)
            for cap in CAPS:
                for compiled in (False, True):
                    for field in ("argmax", "logsumexp") if cap is None else ("argmax",):
                        pair = replaced(cap, field), scan_field(cap, form, field)
                        if compiled:
                            pair = mx.compile(pair[0]), mx.compile(pair[1])
                        times = fastest_of_turns(pair, logits, turns)
                        name = str(dtype).removeprefix("mlx.core.")
                        costs.append(Cost(name, rows, vocab, cap, compiled, form, field, *times))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scan_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--turns", type=int, default=25, help="how often each is timed")
    parser.add_argument("--output", type=Path, default=RESULTS / "scan_cost.json")
    options = parser.parse_args()
    costs = measure(options.turns)
    about = provenance()
    machine = f"{about['machine']['processor']}, mlx {about['versions']['mlx']}"
    print(f"{machine}: MLX's operations, then the scan; ms, fastest of {options.turns}")
    for c in costs:
        how = "compiled" if c.compiled else "eager"
        what = f"{c.rows} x {c.vocab} {c.dtype} cap {c.cap or '-'} {how} {c.form} {c.field}"
        print(f"{what:62} {c.replaced_ms:8.3f} {c.scan_ms:8.3f}  x{c.ratio:.2f}")
    figures = {"turns": options.turns, "costs": [asdict(c) | {"ratio": c.ratio} for c in costs]}
    write_json(options.output, about | figures)


if __name__ == "__main__":
    main()
