"""The command `mlxspec chat`: a conversation in the terminal, as `mlx_lm.chat` has it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mlxspec.cli import generate, options
from mlxspec.cli.arguments import decoding_arguments, engine_arguments
from mlxspec.cli.cached_prompt import CachedPrompt
from mlxspec.cli.chat_input import line_reader, terminal_reader
from mlxspec.cli.chat_session import ChatSession
from mlxspec.cli.checks import (
    TEMPLATE_OPTIONS,
    idle,
    invisible_drafts,
    refuse_combinations,
    warn_of_idle,
    without_effect,
)
from mlxspec.cli.exits import UsageError, run_command, warn
from mlxspec.cli.grammars import constraint_arguments, grammar_of
from mlxspec.cli.loading import Loaded, load_for
from mlxspec.cli.output import DraftStyle, draft_style, print_any_character
from mlxspec.cli.prompts import prompt_ids
from mlxspec.errors import MlxspecError

if TYPE_CHECKING:
    from mlxspec.constraints.grammar import Grammar
    from mlxspec.conversation import Conversation

_NAME = "mlxspec chat"
# The name of a conversation among the texts of a prompt cache: `mlxspec.conversation.files`'s.
_CONVERSATION = "conversation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlxspec chat ...`.

    Args:
        argv: The words after the command; default: the command line's.

    Returns:
        The exit code: 0, 2 after an error, 130 after Ctrl-C off a terminal, 141 if the reader of
        stdout left.
    """
    return run_command(_NAME, lambda: _run(argv))


def setup_arg_parser() -> options.Parser:
    """The parser of this command's options."""
    parser = options.Parser(
        prog=_NAME,
        usage=f"{_NAME} [options]",
        description="Chat with a language model, with or without speculation. Messages are read "
        "from the terminal, or line by line from stdin; /help there lists the commands.",
    )
    options.add_model_options(parser)
    options.add_chat_options(parser)
    options.add_constraint_options(parser)
    options.add_output_options(parser, max_tokens=256, verbose=False)
    options.add_speculation_options(parser)
    options.add_engine_options(parser)
    options.add_sampling_options(parser, seed=0)
    options.add_penalty_options(parser)
    generate.default_what_is_not_asked(parser)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = setup_arg_parser()
    args = parser.parse(argv)
    refuse_combinations(parser, args)
    grammar = grammar_of(args)
    for note in grammar.notes if grammar else ():
        warn(_NAME, f"--json-schema {args.json_schema.path}: {note}")
    cached = CachedPrompt.of(parser, args)
    if cached is not None and _CONVERSATION not in cached.header.metadata:
        raise UsageError(
            f"--prompt-cache-file {cached.path}: it holds a prompt and no conversation; `/save "
            "FILE.safetensors` in a chat writes one, and `mlxspec generate` goes on from a prompt"
        )
    on_terminal = _is_terminal(sys.stdin) and (_is_terminal(sys.stdout) or _is_terminal(sys.stderr))
    style = draft_style(sys.stdout, os.environ) if args.show_drafts else None
    warn_of_idle(_NAME, without_effect(parser, args) + invisible_drafts(args, style))
    read_line = terminal_reader() if on_terminal else line_reader(sys.stdin)
    loaded = load_for(args, args.draft_model, cached.refuse_structure if cached else None)
    if cached is not None and cached.token_count >= loaded.context_length:
        raise UsageError(
            f"--prompt-cache-file {cached.path}: its {cached.token_count} tokens do not fit into a "
            f"context of {loaded.context_length}; raise --max-context-length"
        )
    # What the template refuses of the system prompt it refuses now, before weights are read.
    prompt_ids(loaded.tokenizer, "hello", args)
    if not loaded.tokenizer.has_chat_template and not args.ignore_chat_template:
        print(
            f"{_NAME}: the model has no chat template: the conversation is one running text, "
            "which the model goes on with",
            file=sys.stderr,
        )
        named = idle(parser, args, TEMPLATE_OPTIONS, "the model has no chat template")
        warn_of_idle(_NAME, [named])
    print_any_character(sys.stdout)
    if on_terminal:
        print(_greeting(args, loaded, style), file=sys.stderr)
    conversation = _conversation(loaded, args, grammar, cached)
    if conversation.turns:
        said = "1 turn" if len(conversation.turns) == 1 else f"{len(conversation.turns)} turns"
        print(f"[going on after {said}]", file=sys.stderr)
    session = ChatSession(conversation, read_line, args.model, style, on_terminal=on_terminal)
    return session.run()


def _conversation(
    loaded: Loaded, args: Namespace, grammar: Grammar | None, cached: CachedPrompt | None
) -> Conversation:
    """A conversation over an engine of its own; the grammar is every answer's.

    Raises:
        PromptCacheError: The file of a conversation is damaged, or belongs to other weights.
        UsageError: What only the engine can know, such as the widths that this device leaves it.
    """
    import mlx.core as mx

    from mlxspec.assembly import widened_for_drafts
    from mlxspec.conversation import Conversation
    from mlxspec.conversation.files import resume_conversation
    from mlxspec.engine.pool import new_engine

    templated = loaded.tokenizer.has_chat_template and not args.ignore_chat_template
    options = {k: v for k, v in engine_arguments(args, loaded).items() if v is not None}
    constraint = constraint_arguments(grammar, loaded)
    mx.eval(loaded.model.parameters())
    try:
        engine = new_engine(loaded.model, args.engine, **options)
        decoding = decoding_arguments(args, loaded)
        conversation = Conversation(
            loaded.model,
            loaded.tokenizer,
            engine=widened_for_drafts(engine, **decoding),
            system_prompt=args.system_prompt if templated else None,
            max_tokens=args.max_tokens,
            context_policy=args.context_policy,
            chat_template_config=args.chat_template_config,
            use_chat_template=templated,
            **decoding,
            **constraint,
        )
        if cached is not None:
            resume_conversation(conversation, cached.path)
        return conversation
    except ValueError as problem:
        if isinstance(problem, MlxspecError):
            raise
        raise UsageError(str(problem)) from problem


def _greeting(args: Namespace, loaded: Loaded, style: DraftStyle | None) -> str:
    legend = f" Drafted text is {style.paint(style.name)}." if style else ""
    return (
        f"{args.model}, a context of {loaded.context_length} tokens.{legend} "
        "/help lists the commands, Ctrl-D leaves."
    )


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
