"""The grammar that the options ask for, judged before a model loads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mlxspec.cli.exits import UsageError
from mlxspec.cli.loading import Loaded

if TYPE_CHECKING:
    from mlxspec.constraints.grammar import Grammar
    from mlxspec.generation import GenerationResponse


class Ending:
    """Remembers how a text ended, for what is said after it."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def of(
        self, responses: Generator[GenerationResponse, None, None]
    ) -> Generator[GenerationResponse, None, None]:
        """The same responses, watched."""
        with closing(responses):
            for response in responses:
                self._reason = response.finish_reason
                yield response

    def warning(self, grammar: Grammar | None) -> str:
        """That a limit ended a text that has a grammar; else nothing."""
        if grammar is None or self._reason != "length":
            return ""
        return (
            "--max-tokens or the context ended the text, which may therefore be incomplete; "
            "raise the limit, or bound the grammar"
        )


def grammar_of(args: Namespace) -> Grammar | None:
    """What the output must be; None if anything will do.

    Raises:
        UsageError: A schema or regular expression that is none, that is not supported, or that no
            text satisfies.
    """
    if args.json_schema is None and args.regex is None:
        return None
    from mlxspec.constraints.grammar import Grammar
    from mlxspec.errors import GrammarError

    try:
        if args.json_schema is not None:
            return Grammar.from_json_schema(args.json_schema.text)
        return Grammar.from_regex(args.regex)
    except GrammarError as problem:
        option = "--regex" if args.json_schema is None else f"--json-schema {args.json_schema.path}"
        # The error begins with the kind of grammar, which the option tells.
        raise UsageError(f"{option}: {str(problem).partition(': ')[2]}") from None


def constraint_arguments(grammar: Grammar | None, loaded: Loaded) -> dict[str, Any]:
    """What the output must be, as keyword arguments of the generation."""
    return {} if grammar is None else {"constraint": grammar.bind(loaded.tokenizer)}
