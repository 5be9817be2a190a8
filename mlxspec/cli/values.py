"""The kinds of values that options take; each says what it expected and what came."""

from __future__ import annotations

import json
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mlxspec.numbers import LEAST_TEMPERATURE

T = TypeVar("T")


def whole_number(
    least: int, most: int | None = None, besides: dict[int, str] | None = None
) -> Callable[[str], int]:
    """A type for whole numbers of a range.

    Args:
        least: The smallest.
        most: The largest; None has no end.
        besides: Numbers outside the range that have a meaning of their own, and the meaning.
    """
    others = besides or {}
    expected = f"a whole number {_range(least, most)}" + "".join(
        f", or {number} for {meaning}" for number, meaning in others.items()
    )

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise _unexpected(expected, text) from None
        if number not in others and not _within(number, least, most):
            raise _unexpected(expected, text)
        return number

    return parse


def real_number(least: float | None = None, most: float | None = None) -> Callable[[str], float]:
    """A type for finite numbers of a range, its ends included; None has no end."""
    expected = "a finite number" if least is None else f"a number {_range(least, most)}"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise _unexpected(expected, text) from None
        if not math.isfinite(number) or not _within(number, least, most):
            raise _unexpected(expected, text)
        return number

    return parse


def temperature(text: str) -> float:
    """A type for 0, or a temperature by which logits can be divided."""
    number = real_number(0)(text)
    if 0 < number < LEAST_TEMPERATURE:
        raise _unexpected(f"0 (greedy) or at least {LEAST_TEMPERATURE:g}", text)
    return number


def one_of(*choices: T) -> Callable[[str], T]:
    """A type for the given values."""
    values = {str(choice): choice for choice in choices}
    expected = f"one of {', '.join(values)}"

    def parse(text: str) -> T:
        if text not in values:
            raise _unexpected(expected, text)
        return values[text]

    return parse


def names_of(*choices: str, everything: str) -> Callable[[str], tuple[str, ...]]:
    """A type for names separated by commas, each once; one word stands for all of them."""
    expected = f"names of {', '.join(choices)} with commas between, or {everything}"

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if names == (everything,):
            return choices
        if not set(names) <= set(choices):
            raise _unexpected(expected, text)
        return names

    return parse


def truth(text: str) -> bool:
    """mlx-lm's way to say no: False or F; anything else is yes."""
    return text.lower() not in ("false", "f")


def plain_text(text: str) -> str:
    """Text that a tokenizer can take: bytes that are no UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _unexpected("text in UTF-8", text) from None
    return text


def unescaped(text: str) -> str:
    r"""The text with \n and \t as a line end and a tab, as mlx-lm's command reads a prompt."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def stop_text(text: str) -> str:
    """A text that can end another, its escapes replaced."""
    if not text:
        raise _unexpected("a text that is not empty", text)
    return unescaped(plain_text(text))


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for keyword arguments."""
    expected = 'a JSON object such as {"enable_thinking": false}'
    try:
        value = json.loads(text)
    except ValueError:
        raise _unexpected(expected, text) from None
    if not isinstance(value, dict):
        raise _unexpected(expected, text)
    return value


def logit_biases(text: str) -> dict[int, float]:
    """A JSON object of token ids and what to add to their logits."""
    expected = 'a JSON object of token ids and finite numbers such as {"42": -100}'
    try:
        biases = {int(token): _finite(bias) for token, bias in json.loads(text).items()}
    except (ValueError, AttributeError, OverflowError):
        raise _unexpected(expected, text) from None
    if any(token < 0 for token in biases):
        raise _unexpected(expected, text)
    return biases


def widths(text: str) -> tuple[int, ...]:
    """Tile widths, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise _unexpected("widths from 1 on such as 1,2,4,8,16", text)
    return tuple(int(part) for part in parts)


def adapter_folder(text: str) -> str:
    """A folder with adapters as mlx-lm saves them."""
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (Path(text) / name).is_file():
            raise ArgumentTypeError(
                f"expected a folder with adapters, got {text!r}: it has no {name}"
                if Path(text).is_dir()
                else f"expected a folder with adapters, got {text!r}: there is no such folder"
            )
    return text


class TextFile(NamedTuple):
    """A file that was read.

    Attributes:
        path: As it was given, or what stands for it in messages.
        text: What it says.
    """

    path: str
    text: str


def text_file(path: str) -> TextFile:
    """A file of text, with or without a byte order mark."""
    try:
        return TextFile(path, Path(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise ArgumentTypeError(
            f"expected a file of text in UTF-8, got other bytes in {path!r}"
        ) from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ArgumentTypeError(
            f"expected a file that can be read, got {path!r}: {reason}"
        ) from None


def schema(text: str) -> TextFile:
    """The name of a file that holds a JSON schema, or one that begins with a brace."""
    inline = text.lstrip().startswith("{") and not os.path.isfile(text)
    return TextFile("{...}", text) if inline else text_file(text)


def existing_file(text: str) -> str:
    """A file that is there."""
    if not Path(text).is_file():
        found = "a folder" if Path(text).is_dir() else "nothing of that name"
        raise ArgumentTypeError(f"expected a file, got {text!r}: there is {found}")
    return text


def file_to_write(text: str) -> str:
    """A name for a file in a folder that can be written to."""
    path = Path(os.path.realpath(text))
    if path.exists() and not path.is_file():
        found = "a folder" if path.is_dir() else "something else"
        raise ArgumentTypeError(f"expected a file, got {text!r}: there is {found}")
    if not os.access(path.parent, os.W_OK):
        there = "cannot be written to" if path.parent.is_dir() else "is not there"
        raise ArgumentTypeError(
            f"expected a file in a folder of yours, got {text!r}: {path.parent} {there}"
        )
    return text


def _finite(number: object) -> float:
    """A number of JSON, where there are also words for what is none."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError
    value = float(number)
    if not math.isfinite(value):
        raise ValueError
    return value


def _range(least: float, most: float | None) -> str:
    return f"from {least} on" if most is None else f"from {least} to {most}"


def _within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)


def _unexpected(expected: str, text: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"expected {expected}, got {text!r}")
