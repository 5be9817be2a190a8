"""Grammars: JSON schemas and regular expressions, judged without a tokenizer and bound to one.

They are matched by llguidance. Of the well-kept libraries it is the one that asks for nothing else
(3 MB, wheels for macOS arm64 and Linux; xgrammar asks for torch), refuses what it does not support
by name, rolls back, and allows a forced text in the tokenizer's own tokens alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mlxspec.callers import require_text
from mlxspec.errors import GrammarError
from mlxspec.numbers import whole_number

# JSON as `json.dumps` lays it out. With any whitespace allowed, a small model can write nothing
# else for ever, and hardly a token is forced. A schema's own "x-guidance" wins over it.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What llguidance's error begins with where no token may follow.
_NOTHING_FOLLOWS = "NoExtensionBias"
# A regular expression that is none, with marks below the place, or below two.
_MARKED = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^[ ^]*\nerror: (.*)")
# What llguidance takes for something else: it writes the expression into one line between slashes.
_ENDS_IN_ESCAPE = re.compile(r"(?:[^\\]|\\.)*\\", re.DOTALL)
# A character that is escaped, the beginning or end of a class, or a group's flags.
_ESCAPE_CLASS_OR_FLAGS = re.compile(
    r"\\.|\[\^?\]?|\]|\(\?([a-zA-Z]*)(?:-[a-zA-Z]*)?[:)]", re.DOTALL
)
# Keywords of a JSON schema that hold values, not schemas, and those that hold schemas by names.
_VALUES = ("const", "enum", "default", "examples")
_BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
# How many forced bytes are followed to see whether a grammar has any text at all.
_LONGEST_PROOF = 256

_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], LLTokenizer]] = WeakKeyDictionary()
_making = Lock()


class Grammar:
    """A set of texts. Made by `from_json_schema` or `from_regex`, used by `bind`.

    Attributes:
        notes: Where the grammar allows more than what was asked for, as the schema itself told it
            to ("x-guidance"); a sentence each.
    """

    def __init__(self, source: str, what: str, grammar: str):
        self._source = source
        self._grammar = grammar
        self.notes = _judged(what, grammar)

    @classmethod
    def from_json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Grammar:
        """The JSON texts that a schema takes, laid out as `json.dumps` does.

        Properties come in the schema's order. The schema's "x-guidance" may ask for another
        layout, with the names of llguidance, such as {"whitespace_flexible": true}.

        Args:
            schema: A JSON schema, or its text.

        Raises:
            GrammarError: It is no schema, no text satisfies it, or it says something that is not
                supported; the message names it.
        """
        text = schema if isinstance(schema, str) else _dumped(schema)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(f"JSON schema: expected JSON, got {_cut(text)}: {problem}") from None
        if not isinstance(value, dict | bool):
            raise GrammarError(
                f"JSON schema: expected an object, true or false, got {_cut(json.dumps(value))}"
            )
        if isinstance(value, dict) and not isinstance(value.get("x-guidance", {}), dict):
            layout = _cut(json.dumps(value["x-guidance"]))
            raise GrammarError(f"JSON schema: x-guidance: expected an object, got {layout}")
        if value is False:
            raise GrammarError("JSON schema: no text satisfies false")
        if value is True:
            text = "{}"
        for pattern in _patterns(value):
            if reason := _why_misread(pattern):
                raise GrammarError(f"JSON schema: pattern {_cut(pattern)!r}: {reason}")
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=_LAYOUT)
        except ValueError as problem:
            raise GrammarError(f"JSON schema: {problem}") from None
        return cls(f"JSON schema {_cut(text)}", "JSON schema", grammar)

    @classmethod
    def from_regex(cls, pattern: str) -> Grammar:
        r"""The texts that a regular expression matches from their first character to their last.

        Args:
            pattern: In the syntax of Rust's `regex` crate: as Python's, without look-around,
                back-references, word boundaries and verbose mode.

        Raises:
            GrammarError: It is no regular expression, no text matches it, or it says something
                that is not supported; the message names it.
        """
        try:
            require_text("regex", pattern)
        except ValueError as problem:
            raise GrammarError(str(problem)) from None
        if reason := _why_misread(pattern):
            raise GrammarError(f"regex: {reason}")
        return cls(f"regex {pattern!r}", "regex", LLMatcher.grammar_from_regex(pattern))

    def __repr__(self) -> str:
        return f"<Grammar: {self._source}>"

    def bind(self, tokenizer: Any, end_tokens: Collection[int] | None = None) -> TokenGrammar:
        """The grammar over a tokenizer's tokens.

        Args:
            tokenizer: mlx-lm's wrapper, or a fast one of transformers.
            end_tokens: Ids that end a text; None are the tokenizer's own.

        Raises:
            GrammarError: The tokenizer is no fast one, or there is no end token.
            ValueError: An end token that is no id.
        """
        inner = getattr(tokenizer, "_tokenizer", tokenizer)
        if end_tokens is None:
            # The wrapper's are all that the model's files name.
            wrapped = tokenizer is not inner
            end_tokens = tokenizer.eos_token_ids if wrapped else [inner.eos_token_id]
        ends = frozenset(
            whole_number("end_tokens", token, 0) for token in end_tokens if token is not None
        )
        if not ends:
            raise GrammarError(
                "tokenizer: it names no end token, so a text that is complete could not end; name "
                "one with tokenizer.add_eos_token(...)"
            )
        if not any(token < len(inner) for token in ends):
            raise GrammarError(
                f"end_tokens: none of {', '.join(map(str, sorted(ends)))} is one of the "
                f"tokenizer's {len(inner)} tokens, so a text that is complete could not end"
            )
        return TokenGrammar(self._grammar, _token_table(inner, ends), ends)


class TokenGrammar:
    """Implements `Constraint` by llguidance; safe to share between threads."""

    def __init__(self, grammar: str, table: LLTokenizer, end_tokens: frozenset[int]):
        self._grammar = grammar
        self._table = table
        self._end_tokens = end_tokens

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a text, and are allowed where it may end."""
        return self._end_tokens

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of a text."""
        return GrammarMatcher(self._grammar, self._table, self._end_tokens)


class GrammarMatcher:
    """Implements `TokenMatcher` by llguidance's matcher.

    Where the grammar forces a text, llguidance allows only the token that the tokenizer would
    write it with, not every beginning of it: the model reads such texts so.
    """

    def __init__(self, grammar: str, table: LLTokenizer, end_tokens: frozenset[int]):
        self._matcher = LLMatcher(table, grammar, log_level=0)
        self._table = table
        self._size = table.vocab_size
        self._ends = np.array(sorted(token for token in end_tokens if token < self._size))
        self._end_tokens = end_tokens
        # llguidance hears of no end token: one that is also a word would be taken as text.
        self._ended = False
        self._refuse_error()

    def allowed(self) -> np.ndarray:
        """See `TokenMatcher.allowed`.

        Raises:
            GrammarError: The grammar grew beyond what llguidance computes in one step.
        """
        if self._ended:
            return np.zeros(self._size, bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.get_error().startswith(_NOTHING_FOLLOWS):
            return np.zeros(self._size, bool)
        self._refuse_error()
        row = np.unpackbits(bits, count=self._size, bitorder="little").view(bool)
        if self._matcher.is_accepting():
            # With the end tokens, which llguidance knows.
            return row
        if np.count_nonzero(row) == 1:
            row = self._spelled_out(row)
        row[self._ends] = False
        return row

    def _spelled_out(self, row: np.ndarray) -> np.ndarray:
        """A forced token, and other tokens for the text of a special one.

        The tokenizer itself would write that text with the special token, which means another
        thing to the model.
        """
        if not self._table.is_special_token(int(row.argmax())):
            return row
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        row = np.zeros(self._size, bool)
        row[self._table.greedy_tokenize(text)[:1]] = True
        return row

    def consume(self, token: int) -> None:
        """See `TokenMatcher.consume`.

        Raises:
            GrammarError: The token is not allowed.
        """
        if self._ended:
            raise GrammarError(f"token {token} comes after the end of the text")
        if token in self._end_tokens:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._refuse_error()

    def rollback(self, count: int) -> None:
        """See `TokenMatcher.rollback`."""
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)
            self._refuse_error()

    def _refuse_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"grammar: {_reason(self._matcher.get_error())}")


class _Bytes:
    """A tokenizer of bytes, by which a grammar is judged before there is a model."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _byte_table() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def _judged(what: str, grammar: str) -> tuple[str, ...]:
    """What llguidance warns of.

    Raises:
        GrammarError: It refuses the grammar, or no text can be told to belong to it.
    """
    refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if refused:
        raise GrammarError(f"{what}: {_reason(messages[0])}")
    try:
        matcher = GrammarMatcher(grammar, _byte_table(), frozenset([_Bytes.eos_token_id]))
        for _ in range(_LONGEST_PROOF):
            allowed = np.flatnonzero(matcher.allowed())
            if len(allowed) == 0:
                raise GrammarError("no text satisfies it")
            if len(allowed) > 1 or allowed[0] == _Bytes.eos_token_id:
                break
            matcher.consume(int(allowed[0]))
    except GrammarError as problem:
        raise GrammarError(f"{what}: {problem}") from None
    return tuple(messages)


def _why_misread(pattern: str) -> str | None:
    """Why llguidance would take a regular expression for another one, or None."""
    if _ENDS_IN_ESCAPE.fullmatch(pattern):
        return "it ends in a backslash that escapes nothing"
    classes = 0
    for found in _ESCAPE_CLASS_OR_FLAGS.finditer(pattern):
        if found[0].startswith("["):
            classes += 1
        elif found[0] == "]":
            classes = max(0, classes - 1)
        elif not classes and "x" in (found[1] or ""):
            return "verbose mode, (?x), is not supported; leave out blanks and comments"
    return None


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions in a JSON schema, wherever they stand."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            if isinstance(part.get("patternProperties"), dict):
                yield from part["patternProperties"]
            for key, value in part.items():
                if key in _BY_NAME and isinstance(value, dict):
                    parts += value.values()
                elif key not in _VALUES:
                    parts.append(value)


def _token_table(tokenizer: Any, end_tokens: frozenset[int]) -> LLTokenizer:
    """llguidance's form of a tokenizer, made once: it takes a second for a large vocabulary."""
    from llguidance.hf import from_tokenizer

    key = (len(tokenizer), *sorted(end_tokens))
    with _making:
        tables = _tokenizers.setdefault(tokenizer, {})
        if key not in tables:
            known = [token for token in sorted(end_tokens) if token < len(tokenizer)]
            try:
                tables[key] = from_tokenizer(tokenizer, eos_token=known)
            except ValueError as problem:
                raise GrammarError(
                    f"tokenizer {type(tokenizer).__name__}: {problem}; a grammar needs a "
                    "tokenizer.json of a byte-level vocabulary or one with byte fallback"
                ) from None
        return tables[key]


def _dumped(schema: Any) -> str:
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema))
    except (TypeError, ValueError, RecursionError) as problem:
        raise GrammarError(
            f"JSON schema: expected a dictionary of JSON values or its text, got {schema!r}: "
            f"{problem}"
        ) from None


def _reason(message: str) -> str:
    """A message of llguidance without the dump of its state and the grammar it wraps a regex in."""
    text = message.partition("\n<state>")[0].partition("\n   1 | start: ")[0]
    text = text.rpartition(" (in regex): ")[2].strip()
    if (marked := _MARKED.fullmatch(text)) is None:
        return text
    pattern, before, error = marked.groups()
    place = pattern[len(before) :]
    return f"{error}, at {_cut(place)!r}" if place else f"{error}, at its end"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
