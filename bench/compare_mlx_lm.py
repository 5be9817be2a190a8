"""mlxspec against mlx-lm on five fixed texts, every contender in turns in one run.

    python -m bench.compare_mlx_lm --setting f32-openblas --plot

writes bench/results/compare-f32-openblas.json, .md and .png. bench/README.md says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlxspec
from bench import openblas
from bench.common import RESULTS, Range, markdown_table, provenance, write_json
from bench.contenders import Contender, MlxLmPlain, MlxLmSpeculative, Mlxspec, Run
from bench.workloads import NAMES, load_workload
from mlxspec import PromptLookup, StaticShapeEngine

BASELINE = "mlx-lm plain"
# Those whose figures are claimed run in every repeat; the slow ones beside them run once a text.
REPEATED = (BASELINE, "mlxspec plain", "mlxspec lookup")
# mlx-lm's own default on its command line.
MLX_LM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Setting:
    """A machine and a form of the model's weights.

    Attributes:
        model: What `mlxspec.load` takes.
        openblas: Whether OpenBLAS takes the place of the wheel's scalar BLAS.
        tile_widths: The ladder of "mlxspec plain" and "mlxspec lookup".
        num_draft_tokens: Most tokens that "mlxspec lookup" drafts in a round.
    """

    model: str
    openblas: bool
    tile_widths: tuple[int, ...]
    num_draft_tokens: int


SETTINGS = {
    "f32-openblas": Setting("smollm2:f32", True, (1, 8, 16), 15),
    "bf16": Setting("smollm2:bf16", False, (1, 2, 4, 8, 16), 15),
    "4bit": Setting("smollm2:4bit", False, (1, 2, 4, 8, 16), 15),
}


def main() -> None:
    """Measure one setting and write down what was seen."""
    arguments = _parse()
    setting = _chosen_setting(arguments)
    if setting.openblas:
        openblas.run_again_with_openblas("bench.compare_mlx_lm", sys.argv[1:])
    elif openblas.preloaded():
        sys.exit(f"--setting {arguments.setting} is for the stock wheel: unset LD_PRELOAD")
    report = provenance() | {
        "setting": arguments.setting,
        "model": setting.model,
        "blas": openblas.proof() if setting.openblas else "the wheel's own",
        "max_tokens": arguments.max_tokens,
        "repeats": arguments.repeats,
        "workloads": {},
    }
    model, tokenizer = mlxspec.load(setting.model)
    draft, _ = mlxspec.load(arguments.draft_model)
    contenders = [
        contender
        for contender in _contenders(setting, model, draft, arguments)
        if arguments.contenders is None or contender.name in (BASELINE, *arguments.contenders)
    ]
    for name in arguments.workloads:
        prompt = load_workload(name).prompt(tokenizer)
        runs = _interleaved(contenders, prompt, set(tokenizer.eos_token_ids), arguments)
        answer = runs[BASELINE][0].tokens
        report["workloads"][name] = {
            "prompt_tokens": len(prompt),
            "answer": tokenizer.decode(answer),
            "contenders": {
                contender: _figures(model, prompt, found, runs[BASELINE])
                for contender, found in runs.items()
            },
        }
    table = _table(report)
    print(table)
    stem = arguments.output or RESULTS / f"compare-{arguments.setting}"
    write_json(stem.with_suffix(".json"), report)
    stem.with_suffix(".md").write_text(table + "\n")
    if arguments.plot:
        from bench.compare_plot import plot

        plot(report, stem.with_suffix(".png"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_mlx_lm", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"these beside {BASELINE}; default: all"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs a text; the slow contenders run once"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--tile-widths", type=int, nargs="+", metavar="ROWS")
    parser.add_argument("--num-draft-tokens", type=int, metavar="N")
    parser.add_argument("--min-ngram", type=int, default=3, help="of prompt lookup")
    parser.add_argument(
        "--draft-model",
        default="smollm2:4bit",
        help="for mlx-lm's speculative decoding; %(default)s by default",
    )
    parser.add_argument("--output", type=Path, help="results without their ending")
    parser.add_argument("--plot", action="store_true", help="draw a PNG beside the JSON")
    return parser.parse_args()


def _chosen_setting(arguments: argparse.Namespace) -> Setting:
    setting = SETTINGS[arguments.setting]
    return Setting(
        setting.model,
        setting.openblas,
        tuple(arguments.tile_widths or setting.tile_widths),
        setting.num_draft_tokens
        if arguments.num_draft_tokens is None
        else arguments.num_draft_tokens,
    )


def _contenders(
    setting: Setting, model: nn.Module, draft: nn.Module, arguments: argparse.Namespace
) -> Iterator[Contender]:
    """mlx-lm and mlxspec; and where widths round differently, mlxspec in one class of them."""

    def lookup() -> PromptLookup:
        return PromptLookup(min_ngram=arguments.min_ngram, max_ngram=max(8, arguments.min_ngram))

    yield MlxLmPlain(model, BASELINE)
    yield MlxLmSpeculative(model, draft, arguments.draft_model, MLX_LM_DRAFT_TOKENS)
    engine = StaticShapeEngine(model, tile_widths=setting.tile_widths)
    yield Mlxspec("mlxspec plain", model, engine)
    yield Mlxspec("mlxspec lookup", model, engine, lookup, setting.num_draft_tokens)
    if setting.openblas:
        exact = StaticShapeEngine(model)
        yield Mlxspec("mlxspec plain, exact", model, exact)
        yield Mlxspec("mlxspec lookup, exact", model, exact, lookup, exact.verify_tile_width - 1)


def _interleaved(
    contenders: list[Contender], prompt: list[int], stop: set[int], arguments: argparse.Namespace
) -> dict[str, list[Run]]:
    """Every contender's runs; who comes first changes from repeat to repeat."""
    for contender in contenders:
        contender.warm_up(prompt, arguments.max_tokens)
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for repeat in range(arguments.repeats):
        turn = [c for c in contenders if not repeat or c.name in REPEATED]
        first = repeat % len(turn)
        for contender in turn[first:] + turn[:first]:
            run = contender.run(prompt, arguments.max_tokens, stop)
            runs[contender.name].append(run)
            note = f"{_rate(run):.2f} tokens/s" + ", TRACED ON THE CLOCK" * run.traced
            print(f"  {contender.name}: {len(run.tokens)} tokens, {note}", file=sys.stderr)
    return runs


def _figures(
    model: nn.Module, prompt: list[int], runs: list[Run], baseline: list[Run]
) -> dict[str, Any]:
    """What is known of one contender on one workload.

    Speed-ups are of runs of the same repeat, which met the same mood of the machine.
    """
    last = runs[-1]
    gains = [_rate(run) / _rate(other) for run, other in zip(runs, baseline, strict=False)]
    return {
        "tokens": len(last.tokens),
        "seconds": [round(run.seconds, 4) for run in runs],
        "tokens_per_second": asdict(Range.of([_rate(run) for run in runs])),
        "speed_up": asdict(Range.of(gains)),
        "forwards": last.forwards,
        "tokens_per_forward": len(last.tokens) / last.forwards,
        "same_ids_in_every_repeat": all(run.tokens == last.tokens for run in runs),
        "traced_on_the_clock": any(run.traced for run in runs),
        "first_difference": _first_difference(model, prompt, last.tokens, baseline[-1].tokens),
        **last.details,
    }


def _rate(run: Run) -> float:
    return len(run.tokens) / run.seconds


def _first_difference(
    model: nn.Module, prompt: list[int], tokens: list[int], expected: list[int]
) -> dict[str, Any] | None:
    """Where ids part from mlx-lm plain's and by how much its logits preferred its own; or None."""
    if tokens == expected:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None
    )
    if place is None:
        return {"at_token": min(len(tokens), len(expected)), "logit_margin": None}
    logits = model(mx.array([prompt + expected[:place]]))[0, -1].astype(mx.float32)
    margin = logits[expected[place]] - logits[tokens[place]]
    return {"at_token": place, "logit_margin": margin.item()}


def _table(report: dict[str, Any]) -> str:
    rows = []
    for workload, found in report["workloads"].items():
        for name, figures in found["contenders"].items():
            rate, gain = figures["tokens_per_second"], figures["speed_up"]
            rows.append(
                (
                    workload,
                    name,
                    figures["tokens"],
                    f"{rate['median']:.2f}",
                    f"{gain['median']:.2f}x ({gain['least']:.2f} to {gain['most']:.2f})",
                    f"{figures['tokens_per_forward']:.2f}",
                    _ids(figures["first_difference"]),
                )
            )
    header = ("workload", "", "tokens", "tokens/s", f"against {BASELINE}", "tokens/forward", "ids")
    return markdown_table(header, rows)


def _ids(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "equal"
    if difference["logit_margin"] is None:
        return f"one ends at {difference['at_token']}"
    return f"differ from {difference['at_token']} on (margin {difference['logit_margin']:.1e})"


if __name__ == "__main__":
    main()
