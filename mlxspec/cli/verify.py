"""The command `mlxspec verify`: shows on the user's machine that speculation changes nothing."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.cli import generate, options
from mlxspec.cli.checks import idle
from mlxspec.cli.exits import UsageError, run_command, warn
from mlxspec.cli.prompts import prompt_ids, refuse_length
from mlxspec.cli.values import plain_text, whole_number, widths

if TYPE_CHECKING:
    from mlxspec.verification import Verdict

_NAME = "mlxspec verify"
EXIT_FAULT = 1
_TEXT = ("prompt", "max_tokens", "up_to", "draft_model")
_IGNORED = {
    "kernels": ((*_TEXT, "model", "tile_widths"), "--kernels looks at no model"),
    "probe": (_TEXT, "--probe generates nothing"),
}
_PROMPT = (
    "Repeat this list twice, word for word: apple, banana, cherry, dragonfruit, elderberry, fig."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec verify ...`.

    Args:
        argv: The words after the command; default: the command line's.

    Returns:
        The exit code: 0, 1 if something that is promised does not hold, 2 after an error.
    """
    return run_command(_NAME, lambda: _run(argv))


def setup_arg_parser() -> options.Parser:
    """The parser of this command's options."""
    parser = options.Parser(
        prog=_NAME,
        usage=f"{_NAME} [options]",
        description="Generate plainly, then check that tiles of every width and drafters good and "
        "bad give the same rows of logits, bit for bit, and that mlx-lm's are the same but for "
        "rounding. Exit code 1 only for a fault in what `mlxspec generate` would use.",
    )
    options.add_model_options(parser)
    group = parser.add_argument_group("what to verify")
    group.add_argument(
        "--prompt", "-p", type=plain_text, default=_PROMPT, help="what to ask (default: a list)"
    )
    group.add_argument(
        "--max-tokens",
        "-m",
        type=whole_number(1),
        default=64,
        metavar="N",
        help="tokens to generate (default: %(default)s)",
    )
    group.add_argument(
        "--up-to",
        type=whole_number(1),
        metavar="N",
        help="length of text up to which to look at every place where the engine changes what it "
        "computes: ends of spans and windows, attention's kernels (default: the next span's end, "
        "and windows that are not far)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="let this model draft too; the model itself does in any case",
    )
    group.add_argument(
        "--tile-widths",
        type=widths,
        metavar="W,W,...",
        help="rows that the compiled forwards may have (default: what the layers take)",
    )
    group.add_argument(
        "--kernels",
        action="store_true",
        help="check the scan kernels instead of a model: on a Mac those that run on the GPU",
    )
    group.add_argument(
        "--probe",
        action="store_true",
        help="verify nothing: show what tiles of each width cost here and which of them compute "
        "the same bits, and whether that was remembered or measured now",
    )
    group.add_argument("--json", action="store_true", help="print the verdict as JSON")
    # What is not asked here is as `mlxspec generate` has it.
    asked = {action.dest for action in parser._actions}
    others = vars(generate.setup_arg_parser().parse([]))
    parser.set_defaults(**{name: value for name, value in others.items() if name not in asked})
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = setup_arg_parser()
    args = parser.parse(argv)
    if args.kernels and args.probe:
        raise UsageError("--kernels and --probe: each is a look of its own; give one of them")
    for name, (ignored, reason) in _IGNORED.items():
        if getattr(args, name) and (text := idle(parser, args, ignored, reason)):
            warn(_NAME, f"without effect: {text}")
    return _verify_kernels(args) if args.kernels else _verify_model(args)


def _verify_kernels(args: Namespace) -> int:
    from dataclasses import asdict

    from mlxspec.scan import check_kernels

    verdict = check_kernels(report=_progress())
    _end_progress()
    print(json.dumps(asdict(verdict) | {"passed": verdict.passed}) if args.json else verdict)
    return 0 if verdict.passed else EXIT_FAULT


def _verify_model(args: Namespace) -> int:
    from mlxspec.cli.loading import load_for
    from mlxspec.verification import verify_model

    if args.probe:
        return _probe(args)
    loaded = load_for(args, args.draft_model)
    ids = prompt_ids(loaded.tokenizer, args.prompt, args)
    refuse_length(ids, loaded.context_length)
    verdict = verify_model(
        loaded.model,
        ids,
        max_tokens=args.max_tokens,
        up_to=args.up_to,
        draft_model=loaded.draft_model,
        report=_progress(),
        max_context_length=loaded.context_length,
        tile_widths=args.tile_widths,
    )
    _end_progress()
    print(json.dumps(verdict.as_dict()) if args.json else table(args.model, verdict))
    return 0 if verdict.passed else EXIT_FAULT


def _probe(args: Namespace) -> int:
    from mlxspec.cli.loading import load_for
    from mlxspec.verification import probe_model

    loaded = load_for(args)
    _progress()("measuring what is not remembered, which may take minutes")
    try:
        probe = probe_model(
            loaded.model, max_context_length=loaded.context_length, tile_widths=args.tile_widths
        )
    finally:
        _end_progress()
    print(json.dumps(probe.as_dict()) if args.json else f"{args.model} on {probe}")
    return 0


def table(model: str, verdict: Verdict) -> str:
    """The verdict for a person."""
    versions = ", ".join(f"{name} {number}" for name, number in verdict.versions.items())
    lines = [f"{model} on {verdict.device} ({versions}), {verdict.tokens} tokens, greedy"]
    name_width = max(len(check.name) for check in verdict.checks)
    for place in verdict.places:
        lines += ["", f"{place}:"]
        for check in verdict.checks:
            if check.place == place:
                word = "FAULT" if check.failed else check.status
                note = "" if check.in_use else " [not in use]"
                lines.append(f"  {check.name:<{name_width}}  {word:<8}  {check.detail}{note}")
    classes = " | ".join(", ".join(map(str, group)) for group in verdict.classes)
    lines += ["", f"Tile widths whose rows are equal bit for bit: {classes}"]
    lines.append(f"Decoded in: {', '.join(map(str, verdict.widths))}")
    lines.append(f"Price of exactness: {verdict.price}")
    if verdict.kernels is not None:
        lines.append(f"Kernels: {verdict.kernels}")
    if verdict.not_reached:
        lines.append(f"Not looked at: {'; '.join(verdict.not_reached)}")
    if verdict.note:
        lines.append(f"Engine: {verdict.note}")
    if verdict.passed:
        lines.append("Speculation changes nothing here.")
    else:
        lines.append("A promise does not hold here: please report the lines that say FAULT.")
    return "\n".join(lines)


def _progress() -> Callable[[str], Any]:
    """Says on stderr what is looked at: in one line of a terminal, else line by line."""
    begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
    return lambda name: print(f"{begin}{name} ...", end=end, file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
