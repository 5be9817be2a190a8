"""The command `mlxspec cache-prompt`: processes a prompt ahead, as `mlx_lm.cache_prompt` does."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mlxspec.cli import generate, options
from mlxspec.cli.arguments import engine_arguments
from mlxspec.cli.checks import refuse_combinations, warn_of_idle, without_effect
from mlxspec.cli.exits import UsageError, run_command
from mlxspec.cli.loading import Loaded, load_for
from mlxspec.cli.output import prefill_progress
from mlxspec.cli.prompts import beginning_ids, prompt_text, refuse_length

_NAME = "mlxspec cache-prompt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec cache-prompt ...`.

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
        usage=f"{_NAME} --prompt TEXT --prompt-cache-file FILE [options]",
        description="Process a prompt and save what the model keeps of it, for "
        "`mlxspec generate --prompt-cache-file FILE`.",
    )
    options.add_model_options(parser)
    options.add_cached_prompt_options(parser)
    options.add_engine_options(parser)
    generate.default_what_is_not_asked(parser)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = setup_arg_parser()
    args = parser.parse(argv)
    refuse_combinations(parser, args)
    if args.engine == "dynamic":
        raise UsageError("--engine dynamic: its state is not written to files; leave it out")
    # As mlx-lm's command, which replaces no \n in it.
    text = prompt_text("-") if args.prompt == "-" else args.prompt
    warn_of_idle(_NAME, without_effect(parser, args))
    loaded = load_for(args)
    ids = beginning_ids(loaded.tokenizer, text, args)
    refuse_length(ids, loaded.context_length)
    return _save(loaded, ids, args)


def _save(loaded: Loaded, ids: list[int], args: Namespace) -> int:
    import mlx.core as mx

    from mlxspec.engine import StaticShapeEngine
    from mlxspec.prompt_cache import save_prompt_cache

    engine_options = {k: v for k, v in engine_arguments(args, loaded).items() if v is not None}
    mx.eval(loaded.model.parameters())
    try:
        engine = StaticShapeEngine(loaded.model, **engine_options)
    except ValueError as problem:
        # What only the engine can know, such as the widths that this device leaves it.
        raise UsageError(str(problem)) from problem
    begin = time.perf_counter()
    engine.prefill(ids, prefill_progress(sys.stderr))
    seconds = time.perf_counter() - begin
    file = Path(args.saved_to)
    # A folder is found again from another one.
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    save_prompt_cache(file, engine, {"model": model})
    print(f"Prompt: {len(ids)} tokens, {len(ids) / seconds:.3f} tokens-per-sec")
    print(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    print(f"Saved to {file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0
