"""What coupled sampling leaves of greedy decoding's gain from prompt lookup.

    python -m bench.sampling_cost

Runs under OpenBLAS (see bench/openblas.py): a copy workload, greedy and at a temperature, plain and
with lookup, in turns. A text drawn at a temperature is another text than the greedy one, which
lookup may find harder to guess; both effects are in the figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import mlxspec
from bench import openblas
from bench.common import RESULTS, Range, markdown_table, provenance, write_json
from bench.workloads import load_workload
from mlxspec import PromptLookup, SpeculationStats, StaticShapeEngine

TILE_WIDTHS = (1, 8, 16, 24, 32)


def main() -> None:
    """Measure and write down what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sampling_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workloads", nargs="+", default=["copy", "json_copy"], metavar="NAME")
    parser.add_argument("--temp", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=2, help="seeds, each run once")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    openblas.run_again_with_openblas("bench.sampling_cost", sys.argv[1:])
    report = provenance() | {"blas": openblas.proof(), "temp": arguments.temp, "workloads": {}}
    model, tokenizer = mlxspec.load("smollm2:f32")
    engine = StaticShapeEngine(model, tile_widths=TILE_WIDTHS)
    rows = []
    for name in arguments.workloads:
        prompt = load_workload(name).prompt(tokenizer)
        stop = tokenizer.eos_token_ids

        def run(lookup: bool, seed: int | None, prompt=prompt, stop=stop) -> dict[str, Any]:
            sampling = {} if seed is None else {"temp": arguments.temp, "seed": seed}
            return _run(model, engine, prompt, stop, lookup, arguments.max_tokens, sampling)

        for seed in (None, 0):
            for lookup in (False, True):
                run(lookup, seed)  # traces what the measured runs meet
        gains: dict[str, list[float]] = {"greedy": [], "sampled": []}
        runs = []
        for seed in range(arguments.seeds):
            for kind, drawn in (("greedy", None), ("sampled", seed)):
                plain, drafted = run(False, drawn), run(True, drawn)
                if drafted["tokens"] != plain["tokens"]:
                    sys.exit(f"{name}, {kind}, seed {seed}: lookup changed the text")
                gains[kind].append(plain["ms_per_token"] / drafted["ms_per_token"])
                runs.append({"kind": kind, "seed": drawn, "plain": plain, "lookup": drafted})
        kept = Range.of(gains["sampled"]).median / Range.of(gains["greedy"]).median
        report["workloads"][name] = {
            "gain": {kind: asdict(Range.of(found)) for kind, found in gains.items()},
            "kept": kept,
            "runs": [
                one | {way: {k: v for k, v in one[way].items() if k != "tokens"} for way in
                       ("plain", "lookup")}
                for one in runs
            ],
        }  # fmt: skip
        rows.append(
            [name, *(f"{Range.of(gains[kind]).median:.2f}x" for kind in gains), f"{kept:.0%}"]
        )
    print(markdown_table(["workload", "greedy gain", "sampled gain", "kept"], rows))
    write_json(RESULTS / "sampling_cost.json", report)


def _run(
    model: Any,
    engine: StaticShapeEngine,
    prompt: list[int],
    stop: set[int],
    lookup: bool,
    limit: int,
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """One generation: its tokens, time per token without prefill, and what was drafted."""
    stats = SpeculationStats()
    begin = 0.0

    def mark(processed: int, total: int) -> None:
        nonlocal begin
        begin = time.perf_counter()

    tokens = []
    with closing(
        mlxspec.generate_step(
            prompt,
            model,
            engine=engine,
            drafter=PromptLookup() if lookup else None,
            num_draft_tokens=TILE_WIDTHS[-1] - 1,
            max_tokens=limit,
            stop_tokens=stop,
            stats=stats,
            prompt_progress_callback=mark,
            **sampling,
        )
    ) as steps:
        for token, _, _ in steps:
            tokens.append(token)
    seconds = time.perf_counter() - begin
    return {
        "tokens": tokens,
        "count": len(tokens),
        "ms_per_token": seconds * 1e3 / len(tokens),
        "forwards": stats.forwards,
        "acceptance": stats.acceptance_rate,
    }


if __name__ == "__main__":
    main()
