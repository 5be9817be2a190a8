"""A conversation as a file: JSON or Markdown, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxspec._version import __version__
from mlxspec.conversation.conversation import Conversation


def save_conversation(conversation: Conversation, path: str | Path, *, model: str) -> None:
    """Write every turn, and what was counted, in the form that the file's name asks for.

    Args:
        conversation: The conversation.
        path: Ends in .json or .md. A file of that name is replaced when the new one is complete.
        model: How the file calls the model.

    Raises:
        ValueError: Another ending.
        OSError: The file cannot be written; what stood there before still stands there.
    """
    path = Path(path)
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise ValueError(f"expected a name that ends in {' or '.join(FORMS)}, got {str(path)!r}")
    write_whole(path, form(conversation, model))


def as_json(conversation: Conversation, model: str) -> str:
    """The messages as chat templates and mlx-lm's server take them, and the counters."""
    content: dict[str, Any] = {
        "mlxspec": __version__,
        "model": model,
        "messages": conversation.messages,
        "endings": [turn.ending for turn in conversation.turns],
        "stats": conversation.stats.as_dict(),
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def as_markdown(conversation: Conversation, model: str) -> str:
    """The conversation for people: a heading for every message, and its text as it is."""
    parts = [f"# Chat with {model}"]
    for message in conversation.messages:
        parts += [f"## {message['role'].capitalize()}", message["content"]]
    return "\n\n".join(parts) + "\n"


FORMS: dict[str, Callable[[Conversation, str], str]] = {".json": as_json, ".md": as_markdown}


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that no half of it is ever seen."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is its owner's alone; a text that someone saves is like any other.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
