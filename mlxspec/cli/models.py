"""The command `mlxspec models`: which demo models there are and lie here, and what a model is."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxspec.cli.exits import UsageError, run_command
from mlxspec.cli.options import Parser

if TYPE_CHECKING:
    from mlxspec.models import DemoModel, ModelDescription

_NAME = "mlxspec models"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec models ...`.

    Args:
        argv: The words after the command; default: the command line's.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C, 141 if the reader of stdout left.
    """
    return run_command(_NAME, lambda: _run(argv))


def setup_arg_parser() -> Parser:
    """The parser of this command's own commands."""
    parser = Parser(
        prog=_NAME,
        description="List, fetch and remove the demo models, and tell what a model is.",
    )
    parser.set_defaults(run=_refuse_nothing)
    commands = parser.add_subparsers(metavar="COMMAND")
    listing = commands.add_parser("list", help="the demo models, and what lies in the cache")
    listing.set_defaults(run=_list)
    fetch = commands.add_parser(
        "fetch", help="fetch and convert a demo model, and print its folder"
    )
    fetch.set_defaults(run=_fetch)
    path = commands.add_parser("path", help="print the folder of a demo model that was fetched")
    path.set_defaults(run=_path)
    remove = commands.add_parser("remove", help="remove a demo model from the cache")
    remove.set_defaults(run=_remove)
    remove.add_argument(
        "--all", action="store_true", help="every variant, and the file they are made from"
    )
    for command in (fetch, path, remove):
        command.add_argument(
            "name", metavar="NAME", help="a demo model, alone or with a variant: smollm2:4bit"
        )
    info = commands.add_parser("info", help="what a model is, and which engine takes it")
    info.set_defaults(run=_info)
    info.add_argument(
        "name",
        metavar="MODEL",
        help="a demo model, a local folder, or a repository of the Hugging Face hub; its weights "
        "are neither downloaded nor read",
    )
    info.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def _run(argv: Sequence[str] | None) -> int:
    args = setup_arg_parser().parse(argv)
    args.run(args)
    return 0


def _refuse_nothing(args: Namespace) -> None:
    raise UsageError("expected a command: list, fetch, path, remove or info")


def _list(args: Namespace) -> None:
    from mlxspec.cli.options import DEFAULT_MODEL
    from mlxspec.models import DEMO_MODELS, VARIANTS, cache_dir, demo, demo_folder, is_ready
    from mlxspec.models.registry import choose_form, default_variant

    metal = demo.on_metal()
    for model in DEMO_MODELS.values():
        mark = " (default model)" if model.name == DEFAULT_MODEL else ""
        print(f"{model.name}{mark}: {model.summary}; {model.license}")
        download = _size(sum(wheel.size for wheel in model.wheels))
        kept = demo.gguf_path(model)
        state = f"fetched, {_size(demo.size_on_disk(kept))}" if kept.is_file() else "not fetched"
        print(f"  {'download':<14} {download:>9}  {state}")
        for variant in VARIANTS:
            if is_ready(model, variant):
                size, state = _size(demo.size_on_disk(demo_folder(model, variant))), "converted"
            else:
                form = choose_form(variant, on_metal=metal)
                size = f"~{_size(round(model.parameters * form.bytes_per_parameter))}"
                state = "not converted"
            mark = ", default variant here" if variant == default_variant(on_metal=metal) else ""
            print(f"  {f'{model.name}:{variant}':<14} {size:>9}  {state}{mark}")
    print(f"cache: {cache_dir()}, {_size(demo.size_on_disk(cache_dir()))}{_contents()}")


def _contents() -> str:
    """What lies in the cache folder, each with its size."""
    from mlxspec.models import cache_dir, demo

    if not cache_dir().is_dir():
        return ""
    sizes = {path.name: demo.size_on_disk(path) for path in sorted(cache_dir().iterdir())}
    parts = ", ".join(f"{name} {_size(size)}" for name, size in sizes.items())
    return f" ({parts})" if parts else ""


def _fetch(args: Namespace) -> None:
    from mlxspec.models import prepare

    print(prepare(*_demo_model(args.name)))


def _path(args: Namespace) -> None:
    from mlxspec.errors import ModelNotFound
    from mlxspec.models import demo_folder, is_ready
    from mlxspec.models.loading import not_fetched

    chosen = _demo_model(args.name)
    if not is_ready(*chosen):
        raise ModelNotFound(not_fetched(*chosen))
    print(demo_folder(*chosen))


def _remove(args: Namespace) -> None:
    from mlxspec.models import cache_dir, demo

    model, variant = _demo_model(args.name)
    if args.all and variant is not None:
        raise UsageError(
            f"--all removes every variant and {args.name!r} names one; give {model.name} --all, or "
            f"{args.name} alone"
        )
    freed = demo.remove(model, variant, whole=args.all)
    left = demo.gguf_path(model)
    kept = (
        f"; the fetched file stays, {_size(demo.size_on_disk(left))}: `{_NAME} remove "
        f"{model.name} --all` removes it too"
        if left.is_file()
        else ""
    )
    print(f"{_size(freed)} freed in {cache_dir()}{kept}")


def _info(args: Namespace) -> None:
    from mlxspec.models import describe
    from mlxspec.models.loading import config_folder

    description = describe(config_folder(args.name))
    if args.json:
        print(json.dumps(dataclasses.asdict(description), indent=2))
        return
    for name, value in _lines(description):
        print(f"{name:<12} {value}")


def _lines(model: ModelDescription) -> list[tuple[str, str]]:
    layers = [
        f"{layer.count} {layer.kind}{f' {layer.window}' if layer.window else ''}"
        for layer in model.layers
    ]
    lines = [
        ("family", model.family),
        ("layers", f"{sum(layer.count for layer in model.layers)}: {', '.join(layers)}"),
        ("heads", f"{_or_unknown(model.heads)}, {_or_unknown(model.kv_heads)} for keys and values"),
        ("vocabulary", _or_unknown(model.vocabulary)),
        ("context", str(model.context_length)),
        ("weights", model.weights),
        ("size", "not downloaded" if model.size is None else _size(model.size)),
        ("folder", model.folder),
    ]
    if model.why_not_static:
        return [*lines, ("engine", f"dynamic, without speculation: {model.why_not_static}")]
    widths = ", ".join(map(str, model.tile_widths or ()))
    return [*lines, ("engine", "static"), ("tiles", f"{model.placement}, of {widths} rows")]


def _demo_model(name: str) -> tuple[DemoModel, str | None]:
    """The demo model and variant of a name.

    Raises:
        ModelNotFound: There is none of that name.
    """
    from mlxspec.errors import ModelNotFound
    from mlxspec.models import demo_names
    from mlxspec.models.registry import closest, parse_demo_name

    found = parse_demo_name(name)
    if found is None:
        raise ModelNotFound(
            f"No demo model {name!r}{closest(name, demo_names())}; there are "
            f"{', '.join(demo_names())}."
        )
    return found


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
