"""What is asked in a comparison: the five fixed texts, or the prompts of a user's own file.

A text file holds the turns of a conversation under lines `=== user` and `=== assistant`. If the
last turn is the assistant's, the model goes on from it: with the first words of an answer given,
even a model of 135 million weights makes the change it is asked for instead of copying.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mlxspec.chat_template import rendered_chat

NAMES = ("copy", "code_edit", "json_copy", "passage", "prose")

_TURN = re.compile(r"^=== (user|assistant)\n", flags=re.MULTILINE)
_BETWEEN_PROMPTS = re.compile(r"^---[ \t]*$", flags=re.MULTILINE)
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Workload:
    """A conversation whose answer is to be generated.

    Attributes:
        name: What tables call it.
        messages: Turns, each with "role" and "content".
    """

    name: str
    messages: tuple[dict[str, str], ...]

    def prompt(self, tokenizer: Any) -> list[int]:
        """Token ids up to where the model goes on.

        By the tokenizer's chat template; where there is none, the turns as they are, one under
        the other.
        """
        if not getattr(tokenizer, "has_chat_template", True):
            return list(tokenizer.encode("\n\n".join(turn["content"] for turn in self.messages)))
        begun = self.messages[-1]["role"] == "assistant"
        text = rendered_chat(tokenizer, self.messages, unended=begun)
        return list(tokenizer.encode(text, add_special_tokens=False))


def load_workload(name: str) -> Workload:
    """One of the five fixed texts, see `NAMES`."""
    file = resources.files("mlxspec.benchmark") / "texts" / f"{name}.txt"
    return Workload(name, _conversation(file.read_text(encoding="utf-8")))


def read_prompts(file: Path) -> list[Workload]:
    """The prompts of a file.

    A file whose name ends in `.jsonl` has an object a line: `{"prompt": "..."}` or
    `{"messages": [{"role": "user", "content": "..."}]}`, with a "name" if you like. Any other file
    is text: prompts stand between lines of `---`, and one that begins with a line `=== user` is
    a conversation.

    Raises:
        ValueError: Names the place in the file, what was expected and what came.
        OSError: The file cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    found = _json_lines(text) if file.suffix == ".jsonl" else _blocks(text)
    if not found:
        raise ValueError("expected at least one prompt, got none")
    names = [workload.name for workload in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"expected a name of its own for every prompt, got {twice!r} twice")
    return found


def _blocks(text: str) -> list[Workload]:
    blocks = [block.strip("\n") for block in _BETWEEN_PROMPTS.split(text)]
    return [
        Workload(f"prompt {number}", _conversation(f"{block}\n"))
        for number, block in enumerate((block for block in blocks if block.strip()), 1)
    ]


def _conversation(text: str) -> tuple[dict[str, str], ...]:
    """The turns of a text; a text without turns is what the user says."""
    before, *turns = _TURN.split(text)
    if before.strip():
        return ({"role": "user", "content": text.strip("\n")},)
    return tuple(
        {"role": role, "content": content.strip("\n")}
        for role, content in zip(turns[::2], turns[1::2], strict=True)
    )


def _json_lines(text: str) -> list[Workload]:
    found: list[Workload] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as problem:
            raise ValueError(f"line {number}: expected a JSON object, got {problem}") from None
        if not isinstance(entry, dict):
            raise ValueError(f"line {number}: expected a JSON object, got {line[:40]!r}")
        name = entry.get("name", f"prompt {len(found) + 1}")
        if not isinstance(name, str) or not name:
            raise ValueError(f'line {number}: expected "name" to be a text, got {name!r}')
        found.append(Workload(name, _messages(entry, number)))
    return found


def _messages(entry: dict[str, Any], number: int) -> tuple[dict[str, str], ...]:
    prompt = entry.get("prompt")
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    messages = entry.get("messages")
    if (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(turn, dict)
            and turn.get("role") in _ROLES
            and isinstance(turn.get("content"), str)
            for turn in messages
        )
        and messages[-1]["role"] != "system"
    ):
        return tuple({"role": turn["role"], "content": turn["content"]} for turn in messages)
    raise ValueError(
        f'line {number}: expected "prompt" with a text, or "messages" with turns of a "role" of '
        f'{", ".join(_ROLES)} and a "content", the last not the system\'s, got {entry!r:.60}'
    )
