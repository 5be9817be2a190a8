"""The five fixed texts of the benchmarks, and how a text file becomes a chat.

A file holds the turns of a conversation under lines `=== user` and `=== assistant`. If the last
turn is the assistant's, the model goes on from it: with the first words of an answer given, even a
model of 135 million weights makes the change it is asked for instead of copying.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "workloads"
NAMES = ("copy", "code_edit", "json_copy", "passage", "prose")

_TURN = re.compile(r"^=== (user|assistant)\n", flags=re.MULTILINE)


@dataclass(frozen=True)
class Workload:
    """A conversation whose answer is to be generated.

    Attributes:
        name: The file's name without its ending.
        messages: Turns, each with "role" and "content".
    """

    name: str
    messages: tuple[dict[str, str], ...]

    def prompt(self, tokenizer: Any) -> list[int]:
        """Token ids up to where the model goes on, by the tokenizer's chat template."""
        begun = self.messages[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            list(self.messages), add_generation_prompt=not begun, continue_final_message=begun
        )
        return list(ids)


def load_workload(name: str) -> Workload:
    """Read one of the files in bench/workloads.

    Raises:
        ValueError: The file does not begin with a turn.
    """
    before, *turns = _TURN.split((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    if before.strip() or not turns:
        raise ValueError(f"{name}.txt: expected a first line '=== user', got {before[:40]!r}")
    messages = tuple(
        {"role": role, "content": content.strip("\n")}
        for role, content in zip(turns[::2], turns[1::2], strict=True)
    )
    return Workload(name, messages)
