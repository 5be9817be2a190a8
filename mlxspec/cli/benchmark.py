"""The command `mlxspec benchmark`: mlx-lm and mlxspec on the same texts, in one run."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxspec.cli import generate, options
from mlxspec.cli.checks import refuse_ngram_range
from mlxspec.cli.exits import UsageError, run_command
from mlxspec.cli.values import names_of, whole_number, widths

if TYPE_CHECKING:
    from mlxspec.benchmark import Contender, MlxLmPlain, Workload
    from mlxspec.cli.loading import Loaded

_NAME = "mlxspec benchmark"
_WORKLOADS = ("copy", "code_edit", "json_copy", "passage", "prose")
_QUICK = ("copy", "prose")
# mlx-lm's own default on its command line.
_MLX_LM_DRAFT_TOKENS = 3
_DRAFT_VARIANT = "4bit"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec benchmark ...`.

    Args:
        argv: The words after the command; default: the command line's.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C.
    """
    return run_command(_NAME, lambda: _run(argv))


def setup_arg_parser() -> options.Parser:
    """The parser of this command's options."""
    parser = options.Parser(
        prog=_NAME,
        usage=f"{_NAME} [options]",
        description="Measure mlx-lm, plainly and with its own speculative decoding, against "
        "mlxspec, in turns in one run. Reading the prompt is off the clock for all. The ids are "
        "compared with mlx-lm plain's.",
    )
    options.add_model_options(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--workloads",
        type=names_of(*_WORKLOADS, everything="all"),
        metavar="NAME,NAME,...",
        help=f"texts to answer, of {', '.join(_WORKLOADS)}, or all (default: "
        f"{','.join(_QUICK)}; with --prompts none)",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='prompts of your own: a .jsonl file with {"prompt": "..."} or {"messages": [...]} '
        'a line, and a "name" if you like; or a text with lines of --- between prompts',
    )
    group.add_argument(
        "--max-tokens",
        "-m",
        type=whole_number(2),
        default=100,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    group.add_argument(
        "--repeats",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="runs of each contender on each text (default: %(default)s)",
    )
    _add_speculation_options(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")
    group.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="say what changed against an older --output",
    )
    # What is not asked here is as `mlxspec generate` has it.
    asked = {action.dest for action in parser._actions}
    others = vars(generate.setup_arg_parser().parse([]))
    parser.set_defaults(**{name: value for name, value in others.items() if name not in asked})
    return parser


def _add_speculation_options(parser: options.Parser) -> None:
    group = parser.add_argument_group("how mlxspec and mlx-lm speculate")
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="drafts for speculative decoding with a model (default: of a demo model its "
        f"{_DRAFT_VARIANT} form, else there is none)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=whole_number(1),
        metavar="N",
        help="a fixed draft count for mlxspec (default: as `mlxspec generate` has it)",
    )
    group.add_argument(
        "--prompt-lookup-min-ngram", type=whole_number(1), metavar="N", help="as generate's"
    )
    group.add_argument(
        "--prompt-lookup-max-ngram", type=whole_number(1), metavar="N", help="as generate's"
    )
    group.add_argument(
        "--tile-widths",
        type=widths,
        metavar="W,W,...",
        help="rows that the compiled forwards may have (default: what the layers take)",
    )
    group.add_argument("--no-exact", action="store_true", help="as generate's")


def _run(argv: Sequence[str] | None) -> int:
    args = setup_arg_parser().parse(argv)
    refuse_ngram_range(args)
    _refuse_files(args)
    draft_name = args.draft_model or _draft_of(args.model)
    workloads = _workloads(args)
    from mlxspec.benchmark.history import differences, differences_page, read_result

    old = _read("--compare", args.compare, read_result) if args.compare else None
    from mlxspec.cli.loading import load_for

    loaded = load_for(args, draft_name)
    prompts = _prompts(workloads, loaded, args)
    from mlxspec.benchmark import provenance, table, write_json

    report: dict[str, Any] = provenance([*_NAME.split(), *(sys.argv[1:] if argv is None else argv)])
    report |= {
        "model": _shown(args.model),
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "draft_model": draft_name and _shown(draft_name),
        "num_draft_tokens": args.num_draft_tokens,
    }
    report |= _measure(loaded, prompts, draft_name, args)
    print(_title(report))
    print(table(report))
    if report["engine_note"]:
        print(f"Engine: {report['engine_note']}")
    if old is not None:
        report["compared"] = differences(old, report)
        print(f"\n{differences_page(report['compared'])}")
    if args.output:
        write_json(args.output, report)
    if args.plot:
        from mlxspec.benchmark.plot import plot

        plot(report, args.plot)
        print(f"written: {args.plot}", file=sys.stderr)
    return 0


def _measure(
    loaded: Loaded, prompts: dict[str, list[int]], draft_name: str | None, args: Namespace
) -> dict[str, Any]:
    import mlx.core as mx
    from tqdm import tqdm

    from mlxspec import StaticShapeEngine
    from mlxspec.benchmark import BASELINE, MlxLmPlain, Run, compare

    mx.eval(loaded.model.parameters(), loaded.draft_model and loaded.draft_model.parameters())
    try:
        engine = StaticShapeEngine(
            loaded.model,
            max_context_length=loaded.context_length,
            tile_widths=args.tile_widths,
            exact=not args.no_exact,
        )
        # As `mlxspec generate` runs where it chooses how much to draft.
        engine = engine if args.num_draft_tokens is not None else engine.widened()
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    baseline: MlxLmPlain = MlxLmPlain(loaded.model, BASELINE)
    others = list(_others(loaded, engine, draft_name, args))
    runs = len(prompts) * args.repeats * (1 + len(others))
    with tqdm(total=runs, unit="run", file=sys.stderr, disable=None, desc="warming up") as bar:

        def report(workload: str, contender: str, run: Run) -> None:
            done = f"{workload}, {contender}: {len(run.tokens) / run.seconds:.1f}/s"
            if bar.disable:
                print(done, file=sys.stderr, flush=True)
            bar.set_description(done)
            bar.update()

        found = compare(
            baseline,
            others,
            prompts,
            loaded.tokenizer,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            report=report,
        )
    engine_facts = {"tile_widths": list(engine.tile_widths), "engine_note": engine.note}
    return engine_facts | found


def _others(
    loaded: Loaded, engine: Any, draft_name: str | None, args: Namespace
) -> Iterator[Contender]:
    """The contenders beside mlx-lm plain."""
    from mlxspec import DraftModel, PromptLookup
    from mlxspec.benchmark import MlxLmSpeculative, Mlxspec

    ngrams, draft = options.ngram_range(args), loaded.draft_model
    if draft_name is not None:
        yield MlxLmSpeculative(loaded.model, draft, _shown(draft_name), _MLX_LM_DRAFT_TOKENS)
    yield Mlxspec("mlxspec plain", loaded.model, engine)
    yield Mlxspec(
        "mlxspec lookup",
        loaded.model,
        engine,
        lambda: PromptLookup(*ngrams),
        args.num_draft_tokens,
    )
    if draft_name is not None:
        exact = False if args.no_exact else None
        yield Mlxspec(
            "mlxspec draft model",
            loaded.model,
            engine,
            lambda: DraftModel(draft, exact=exact),
            args.num_draft_tokens,
            has_own_graphs=True,
        )


def _draft_of(model: str) -> str | None:
    """The default draft: a demo model's small form."""
    from mlxspec.models.registry import parse_demo_name

    demo = parse_demo_name(model)
    return None if demo is None else f"{demo[0].name}:{_DRAFT_VARIANT}"


def _workloads(args: Namespace) -> list[Workload]:
    from mlxspec.benchmark.workloads import load_workload, read_prompts

    names = args.workloads or (() if args.prompts else _QUICK)
    own = _read("--prompts", args.prompts, read_prompts) if args.prompts else []
    if twice := next((w.name for w in own if w.name in names), None):
        raise UsageError(
            f"--prompts: {twice!r} is the name of one of --workloads too; rename it in the file"
        )
    return [*map(load_workload, names), *own]


def _prompts(workloads: list[Workload], loaded: Loaded, args: Namespace) -> dict[str, list[int]]:
    """Token ids by workload; all are looked at before anything is measured."""
    prompts = {}
    for workload in workloads:
        try:
            ids = workload.prompt(loaded.tokenizer)
        except ValueError as problem:
            raise UsageError(f"{workload.name}: {problem}") from problem
        if not ids:
            raise UsageError(f"{workload.name}: expected at least one token, got an empty prompt")
        if len(ids) + args.max_tokens > loaded.context_length:
            raise UsageError(
                f"{workload.name}: {len(ids)} tokens and an answer of {args.max_tokens} do not fit "
                f"a context of {loaded.context_length}; lower --max-tokens, or leave it out"
            )
        prompts[workload.name] = ids
    return prompts


def _read(option: str, file: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` makes of an option's file; what is wrong with it is said by name."""
    try:
        return read(file)
    except (ValueError, OSError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(f"{option} {file}: {reason}") from problem


def _refuse_files(args: Namespace) -> None:
    """Refuse results that could not be written: minutes of measuring would be lost."""
    for name in ("output", "plot"):
        file: Path | None = getattr(args, name)
        if file is None:
            continue
        folder = file.parent
        if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(f"--{name} {file}: expected a file in a folder that can be written to")
    if args.plot is None:
        return
    if args.plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {args.plot}: expected a name that ends in .png")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'mlxspec[bench]'")


def _shown(model: str) -> str:
    """Of a folder elsewhere the name is enough: where it lies is nobody's business."""
    return Path(model).name if Path(model).is_absolute() else model


def _title(report: dict[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    runs = "1 run" if report["repeats"] == 1 else f"{report['repeats']} runs"
    return (
        f"{report['model']} on {machine['processor']}, {machine['device']}; mlxspec "
        f"{versions['mlxspec']}, mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}; "
        f"{runs} each, {report['seconds']:.0f} seconds in all\n"
    )
