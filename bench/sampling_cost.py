"""What coupled sampling leaves of greedy decoding's gain from prompt lookup.

    python -m bench.sampling_cost

Runs under OpenBLAS (see bench/openblas.py): a copy workload, greedy and at a temperature, plain and
with lookup, in turns. A text drawn at a temperature is another text than the greedy one, which
lookup may find harder to guess; both effects are in the figure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mlxspec
from bench import openblas
from bench.common import RESULTS
from mlxspec import PromptLookup, StaticShapeEngine
from mlxspec.benchmark import (
    NAMES,
    Mlxspec,
    Run,
    Spread,
    load_workload,
    markdown_table,
    provenance,
    write_json,
)

TILE_WIDTHS = (1, 8, 16, 24, 32)


def main() -> None:
    """Measure and write down what was seen."""
    arguments = _parse()
    openblas.run_again_with_openblas("bench.sampling_cost", sys.argv[1:])
    report: dict[str, Any] = provenance() | {
        "blas": openblas.proof(),
        "temp": arguments.temp,
        "max_tokens": arguments.max_tokens,
        "num_draft_tokens": arguments.num_draft_tokens,
        "workloads": {},
    }
    model, tokenizer = mlxspec.load("smollm2:f32")
    engine = StaticShapeEngine(model, tile_widths=TILE_WIDTHS)

    def contender(lookup: bool, seed: int | None) -> Mlxspec:
        sampling = {} if seed is None else {"temp": arguments.temp, "seed": seed}
        drafter = PromptLookup if lookup else None
        name = "lookup" if lookup else "plain"
        return Mlxspec(name, model, engine, drafter, arguments.num_draft_tokens, sampling)

    rows = []
    for name in arguments.workloads:
        prompt = load_workload(name).prompt(tokenizer)
        for seed in (None, 0):
            contender(True, seed).warm_up(prompt, arguments.max_tokens)
        gains: dict[str, list[float]] = {"greedy": [], "sampled": []}
        runs = []
        for seed in range(arguments.seeds):
            for kind, drawn in (("greedy", None), ("sampled", seed)):
                plain, drafted = (
                    contender(lookup, drawn).run(
                        prompt, arguments.max_tokens, tokenizer.eos_token_ids
                    )
                    for lookup in (False, True)
                )
                if drafted.tokens != plain.tokens:
                    sys.exit(f"{name}, {kind}, seed {seed}: lookup changed the text")
                gains[kind].append(plain.seconds / drafted.seconds)
                found = {"plain": _figures(plain), "lookup": _figures(drafted)}
                runs.append({"kind": kind, "seed": drawn} | found)
        kept = Spread.of(gains["sampled"]).median / Spread.of(gains["greedy"]).median
        report["workloads"][name] = {
            "gain": {kind: Spread.of(found).as_dict() for kind, found in gains.items()},
            "kept": kept,
            "runs": runs,
        }
        medians = (f"{Spread.of(found).median:.2f}x" for found in gains.values())
        rows.append([name, *medians, f"{kept:.0%}"])
    print(markdown_table(["workload", "greedy gain", "sampled gain", "kept"], rows))
    write_json(arguments.output, report)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sampling_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=NAMES, default=["copy", "json_copy"], metavar="NAME"
    )
    parser.add_argument("--temp", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=2, help="seeds, each run once")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        default=TILE_WIDTHS[-1] - 1,
        metavar="N",
        help="the same for all, so that only the text differs; default: %(default)s",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "sampling_cost.json")
    return parser.parse_args()


def _figures(run: Run) -> dict[str, Any]:
    stats = run.details["stats"]
    return {
        "count": len(run.tokens),
        "ms_per_token": run.seconds * 1e3 / len(run.tokens),
        "forwards": run.forwards,
        "acceptance": stats["acceptance_rate"],
        "traced_on_the_clock": run.traced,
    }


if __name__ == "__main__":
    main()
