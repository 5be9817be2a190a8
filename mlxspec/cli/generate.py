"""The command `mlxspec generate`: answers one prompt, as `mlx_lm.generate` does."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxspec.cli import options
from mlxspec.cli.arguments import decoding_arguments, engine_arguments
from mlxspec.cli.cached_prompt import CachedPrompt
from mlxspec.cli.checks import (
    TEMPLATE_OPTIONS,
    idle,
    invisible_drafts,
    refuse_combinations,
    warn_of_idle,
    without_effect,
)
from mlxspec.cli.exits import UsageError, run_command, warn
from mlxspec.cli.grammars import Ending, constraint_arguments, grammar_of
from mlxspec.cli.loading import Loaded, load_for
from mlxspec.cli.output import (
    DraftStyle,
    draft_style,
    prefill_progress,
    print_any_character,
    print_text,
)
from mlxspec.cli.prompts import prompt_ids, prompt_text, refuse_length, suffix_ids

if TYPE_CHECKING:
    from mlxspec.constraints.grammar import Grammar

_NAME = "mlxspec generate"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec generate ...`.

    Args:
        argv: The words after the command; default: the command line's.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C, 141 if the reader of stdout left.
    """
    return run_command(_NAME, lambda: _run(argv), "interrupted before the first token")


def setup_arg_parser() -> options.Parser:
    """The parser of this command's options."""
    parser = options.Parser(
        prog=_NAME,
        usage=f"{_NAME} [options]",
        description="Generate text from a prompt with a language model, "
        "with or without speculation.",
    )
    options.add_model_options(parser)
    options.add_prompt_options(parser)
    options.add_constraint_options(parser)
    options.add_output_options(parser)
    options.add_speculation_options(parser)
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    options.add_penalty_options(parser)
    return parser


def default_what_is_not_asked(parser: options.Parser) -> None:
    """Give a command the defaults of `generate` for every option that it does not have."""
    asked = {action.dest for action in parser._actions}
    others = vars(setup_arg_parser().parse([]))
    parser.set_defaults(**{name: value for name, value in others.items() if name not in asked})


def _run(argv: Sequence[str] | None) -> int:
    parser = setup_arg_parser()
    args = parser.parse(argv)
    refuse_combinations(parser, args)
    grammar = grammar_of(args)
    for note in grammar.notes if grammar else ():
        warn(_NAME, f"--json-schema {args.json_schema.path}: {note}")
    text = prompt_text(args.prompt)
    style = draft_style(sys.stdout, os.environ) if args.show_drafts else None
    cached = CachedPrompt.of(parser, args)
    warn_of_idle(_NAME, without_effect(parser, args) + invisible_drafts(args, style))
    loaded = load_for(args, args.draft_model, cached.refuse_structure if cached else None)
    if cached is None:
        ids = prompt_ids(loaded.tokenizer, text, args)
    else:
        ids = suffix_ids(loaded.tokenizer, text, args)
    refuse_length(ids, loaded.context_length, before=cached.token_count if cached else 0)
    if not loaded.tokenizer.has_chat_template and not args.ignore_chat_template:
        named = idle(parser, args, TEMPLATE_OPTIONS, "the model has no chat template")
        warn_of_idle(_NAME, [named])
    return _generate(loaded, ids, args, style, grammar, cached)


def _generate(
    loaded: Loaded,
    ids: list[int],
    args: Namespace,
    style: DraftStyle | None,
    grammar: Grammar | None,
    cached: CachedPrompt | None,
) -> int:
    import mlx.core as mx

    from mlxspec.generation import report, stream_generate

    print_any_character(sys.stdout)
    constraint = constraint_arguments(grammar, loaded)
    # Reading the weights is no part of the prompt's time.
    mx.eval(loaded.model.parameters())
    try:
        running: dict[str, Any] = {"engine": args.engine, **engine_arguments(args, loaded)}
        decoding = decoding_arguments(args, loaded)
        if cached is not None:
            running = {"engine": cached.engine(args, loaded, decoding)}
            ids = [*running["engine"].tokens, *ids]
        responses = stream_generate(
            loaded.model,
            loaded.tokenizer,
            ids,
            max_tokens=args.max_tokens,
            prompt_progress_callback=prefill_progress(sys.stderr),
            **running,
            **decoding,
            **constraint,
        )
    except ValueError as problem:
        # What only the engine can know, such as the widths that this device leaves it.
        raise UsageError(str(problem)) from problem
    ending = Ending()
    code = print_text(ending.of(responses), style, report if args.verbose else None)
    warn(_NAME, ending.warning(grammar))
    return code
