"""mlxspec against mlx-lm on five fixed texts, every contender in turns in one run.

    python -m bench.compare_mlx_lm --setting f32-openblas --plot

writes bench/results/compare-f32-openblas.json, .md and .png. What is measured, and how, is
`mlxspec.benchmark`'s; here are the settings whose results this repository keeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

import mlxspec
from bench import openblas
from bench.common import RESULTS
from bench.draft_models import keep_first_layers
from mlxspec import DraftModel, PromptLookup, StaticShapeEngine
from mlxspec.benchmark import (
    BASELINE,
    NAMES,
    Contender,
    MlxLmPlain,
    MlxLmSpeculative,
    Mlxspec,
    Run,
    compare,
    load_workload,
    provenance,
    table,
    write_json,
)

# Those whose figures are claimed run in every repeat; the slow ones beside them run once a text.
REPEATED = (BASELINE, "mlxspec plain", "mlxspec lookup")
DRAFTED = "mlxspec draft model"
DRAFT_MODEL = "smollm2:4bit"
# mlx-lm's own default on its command line.
MLX_LM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Setting:
    """A machine and a form of the model's weights.

    Attributes:
        model: What `mlxspec.load` takes.
        openblas: Whether OpenBLAS takes the place of the wheel's scalar BLAS.
        exact: Whether "mlxspec plain" and "mlxspec lookup" keep to widths that round alike.
        draft_layers: The draft model is the model itself with so many layers; None: another one.
        workloads: What is answered.
        repeated: Contenders that run in every repeat.
    """

    model: str
    openblas: bool
    exact: bool
    draft_layers: int | None = None
    workloads: tuple[str, ...] = NAMES
    repeated: tuple[str, ...] = REPEATED


SETTINGS = {
    "f32-openblas": Setting("smollm2:f32", openblas=True, exact=False),
    "f32": Setting("smollm2:f32", openblas=False, exact=True),
    "bf16": Setting("smollm2:bf16", openblas=False, exact=True),
    "4bit": Setting("smollm2:4bit", openblas=False, exact=True),
    # Where drafting cannot pay: a draft seldom right, and its head, most of what a token costs,
    # as dear as the model's own. mlx-lm's Gemma 3 needs its first global layer, which is the sixth.
    "gemma3-layers": Setting(
        "gemma3:f32",
        openblas=True,
        exact=False,
        draft_layers=6,
        workloads=("prose", "passage"),
        repeated=(*REPEATED, DRAFTED),
    ),
}


def main() -> None:
    """Measure one setting and write down what was seen."""
    arguments = _parse()
    setting = SETTINGS[arguments.setting]
    if setting.openblas:
        openblas.run_again_with_openblas("bench.compare_mlx_lm", sys.argv[1:])
    elif openblas.preloaded():
        sys.exit(f"--setting {arguments.setting} is for the stock wheel: unset LD_PRELOAD")
    draft, draft_name = _draft(setting, arguments)
    report: dict[str, Any] = provenance() | {
        "setting": arguments.setting,
        "model": setting.model,
        "blas": openblas.proof() if setting.openblas else "the wheel's own",
        "max_tokens": arguments.max_tokens,
        "repeats": arguments.repeats,
        "draft_model": draft_name,
        "num_draft_tokens": arguments.num_draft_tokens,
        "tile_widths": arguments.tile_widths,
    }
    model, tokenizer = mlxspec.load(setting.model)
    others = [
        contender
        for contender in _others(setting, model, draft, draft_name, arguments)
        if arguments.contenders is None or contender.name in arguments.contenders
    ]
    workloads = arguments.workloads or setting.workloads
    prompts = {name: load_workload(name).prompt(tokenizer) for name in workloads}
    report |= compare(
        MlxLmPlain(model, BASELINE),
        others,
        prompts,
        tokenizer,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        once=[contender.name for contender in others if contender.name not in setting.repeated],
        report=_say,
    )
    page = f"{table(report)}\n\n{report['seconds']:.0f} seconds in all."
    print(page)
    stem = arguments.output or RESULTS / f"compare-{arguments.setting}"
    write_json(stem.with_suffix(".json"), report)
    stem.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    if arguments.plot:
        from mlxspec.benchmark.plot import plot

        plot(report, stem.with_suffix(".png"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_mlx_lm", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"some of {', '.join(NAMES)}; default: all, of gemma3-layers prose and passage",
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"these beside {BASELINE}; default: all"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs a text; the slow contenders run once"
    )
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument(
        "--tile-widths",
        type=int,
        nargs="+",
        metavar="ROWS",
        help="a fixed ladder; default: what a user gets, wider tiles where they pay",
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="a fixed draft count of prompt lookup; default: what a user gets who does not say",
    )
    parser.add_argument("--min-ngram", type=int, default=3, help="of prompt lookup")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument(
        "--draft-model",
        metavar="MODEL",
        help=f"for speculative decoding with a model; default: {DRAFT_MODEL}",
    )
    drafts.add_argument(
        "--draft-layers",
        type=int,
        metavar="N",
        help="draft with the model itself, all layers but its first N left out; default: 6 of "
        "gemma3-layers, else none are",
    )
    parser.add_argument("--output", type=Path, help="results without their ending")
    parser.add_argument("--plot", action="store_true", help="draw a PNG beside the JSON")
    return parser.parse_args()


def _draft(setting: Setting, arguments: argparse.Namespace) -> tuple[nn.Module, str]:
    """The draft model and what the result calls it."""
    layers = setting.draft_layers if arguments.draft_layers is None else arguments.draft_layers
    if arguments.draft_model is not None or layers is None:
        name = arguments.draft_model or DRAFT_MODEL
        return mlxspec.load(name)[0], name
    draft, _ = mlxspec.load(setting.model, lazy=True)
    of = len(draft.layers)
    try:
        keep_first_layers(draft, layers)
    except ValueError as problem:
        sys.exit(f"--draft-layers: {problem}")
    return draft, f"{setting.model}, {layers} of {of} layers"


def _others(
    setting: Setting,
    model: nn.Module,
    draft: nn.Module,
    draft_name: str,
    arguments: argparse.Namespace,
) -> Iterator[Contender]:
    """mlx-lm and mlxspec; and where widths round differently, mlxspec in one class of them."""

    def lookup() -> PromptLookup:
        return PromptLookup(min_ngram=arguments.min_ngram, max_ngram=max(8, arguments.min_ngram))

    count = arguments.num_draft_tokens
    yield MlxLmSpeculative(model, draft, draft_name, MLX_LM_DRAFT_TOKENS)
    engine = _engine(model, arguments.tile_widths, setting.exact)
    yield Mlxspec("mlxspec plain", model, engine)
    yield Mlxspec("mlxspec lookup", model, engine, lookup, count)
    yield Mlxspec(
        DRAFTED,
        model,
        engine,
        lambda: DraftModel(draft),
        count,
        has_own_graphs=True,
    )
    if setting.openblas:
        exact = _engine(model, None, True)
        yield Mlxspec("mlxspec plain, exact", model, exact)
        yield Mlxspec("mlxspec lookup, exact", model, exact, lookup, count)


def _engine(model: nn.Module, widths: list[int] | None, exact: bool) -> StaticShapeEngine:
    """An engine of these widths, or as a user gets it: with wider tiles where they pay."""
    return StaticShapeEngine(model, tile_widths=widths, exact=exact).widened()


def _say(workload: str, contender: str, run: Run) -> None:
    rate = f"{len(run.tokens) / run.seconds:.2f} tokens/s"
    traced = ", TRACED ON THE CLOCK" * run.traced
    print(f"  {workload}, {contender}: {len(run.tokens)} tokens, {rate}{traced}", file=sys.stderr)


if __name__ == "__main__":
    main()
