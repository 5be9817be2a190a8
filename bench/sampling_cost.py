"""What coupled sampling leaves of greedy decoding's gain from prompt lookup.

    python -m bench.sampling_cost

Runs under OpenBLAS (see bench/openblas.py): a copy workload, greedy and at a temperature, plain and
with lookup, in turns. A text drawn at a temperature is another text than the greedy one, which
lookup may find harder to guess. So each text is drafted a second time by one who knows it: what is
lost there is what the sampler costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlxspec
from bench import openblas
from bench.common import RESULTS
from bench.gemma_window import Oracle
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
from mlxspec.drafting import Drafter

TILE_WIDTHS = (1, 8, 16, 24, 32)
WAYS = ("lookup", "right drafts")


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

    def contender(make_drafter: Callable[[], Drafter] | None, seed: int | None) -> Mlxspec:
        sampling = {} if seed is None else {"temp": arguments.temp, "seed": seed}
        return Mlxspec("", model, engine, make_drafter, arguments.num_draft_tokens, sampling)

    rows = []
    for name in arguments.workloads:
        prompt = load_workload(name).prompt(tokenizer)
        for seed in (None, 0):
            contender(PromptLookup, seed).warm_up(prompt, arguments.max_tokens)
        gains: dict[str, dict[str, list[float]]] = {
            way: {"greedy": [], "sampled": []} for way in WAYS
        }
        runs = []
        for seed in range(arguments.seeds):
            for kind, drawn in (("greedy", None), ("sampled", seed)):
                plain = _run(contender(None, drawn), prompt, tokenizer, arguments)
                text = prompt + plain.tokens
                drafters: dict[str, Callable[[], Drafter]] = {
                    "lookup": PromptLookup,
                    "right drafts": partial(Oracle, text),
                }
                found = {"plain": _figures(plain)}
                for way, make_drafter in drafters.items():
                    drafted = _run(contender(make_drafter, drawn), prompt, tokenizer, arguments)
                    if drafted.tokens != plain.tokens:
                        sys.exit(f"{name}, {kind}, seed {seed}: {way} changed the text")
                    gains[way][kind].append(plain.seconds / drafted.seconds)
                    found[way] = _figures(drafted)
                runs.append({"kind": kind, "seed": drawn} | found)
        report["workloads"][name] = {"gain": {}, "kept": {}, "runs": runs}
        for way, by_kind in gains.items():
            spreads = {kind: Spread.of(found) for kind, found in by_kind.items()}
            kept = spreads["sampled"].median / spreads["greedy"].median
            report["workloads"][name]["gain"][way] = {k: s.as_dict() for k, s in spreads.items()}
            report["workloads"][name]["kept"][way] = kept
            medians = (f"{spread.median:.2f}x" for spread in spreads.values())
            rows.append([name, way, *medians, f"{kept:.0%}"])
    print(markdown_table(["workload", "drafts", "greedy gain", "sampled gain", "kept"], rows))
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


def _run(contender: Mlxspec, prompt: list[int], tokenizer: Any, arguments: Any) -> Run:
    return contender.run(prompt, arguments.max_tokens, tokenizer.eos_token_ids)


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
