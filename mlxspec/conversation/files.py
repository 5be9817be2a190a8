"""A conversation as a file: JSON or Markdown to read, a prompt cache to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxspec._version import __version__
from mlxspec.conversation.conversation import Conversation
from mlxspec.decoding.turns import common_length
from mlxspec.errors import PromptCacheError
from mlxspec.prompt_cache import load_prompt_cache, read_prompt_cache_header, save_prompt_cache
from mlxspec.whole_files import replacing

# The text of a prompt cache that is the conversation itself.
CONVERSATION = "conversation"


def save_conversation(conversation: Conversation, path: str | Path, *, model: str) -> None:
    """Write every turn in the form that the file's name asks for.

    Args:
        conversation: The conversation, of which no answer is being generated.
        path: Ends in .json, .md or .safetensors: what the engine holds, which
            `resume_conversation` reads. A file of that name is replaced when the new one is
            complete.
        model: How the file calls the model.

    Raises:
        ValueError: Another ending.
        PromptCacheError: The engine's state cannot be written, or there is none.
        EngineBusy: An answer is being generated.
        OSError: The file cannot be written; what stood there before still stands there.
    """
    path = Path(path)
    form = path.suffix.lower()
    if form == ".safetensors":
        _save_state(conversation, path, model)
    elif form in _FORMS:
        with replacing(path) as scratch:
            scratch.write_text(
                _FORMS[form](conversation, model), encoding="utf-8", errors="replace"
            )
    else:
        names = ", ".join(_FORMS)
        raise ValueError(f"expected a name that ends in {names} or .safetensors, got {str(path)!r}")


def resume_conversation(conversation: Conversation, path: str | Path) -> None:
    """Put a saved conversation in the place of this one, and what its engine held into this one's.

    Args:
        conversation: Over an engine of the same model and quantisation. Its options stay its own,
            but for the system prompt.
        path: Written by `save_conversation` as .safetensors.

    Raises:
        PromptCacheError: The file holds no conversation, is damaged, or was made with another
            model. The conversation is as it was.
        EngineBusy: An answer is being generated.
        OSError: The file cannot be read.
    """
    header = read_prompt_cache_header(path)
    if header is None or CONVERSATION not in header.metadata:
        raise PromptCacheError(f"{path} holds no conversation, only a prompt")
    try:
        saved = json.loads(header.metadata[CONVERSATION])
        restore = conversation.restorer(saved)
    except (KeyError, TypeError, ValueError) as problem:
        raise PromptCacheError(f"{path} is damaged: its conversation cannot be read") from problem
    load_prompt_cache(path, conversation.engine)
    restore()


def _save_state(conversation: Conversation, path: Path, model: str) -> None:
    saved = conversation.as_dict()
    if not conversation.turns:
        raise PromptCacheError("nothing was said yet, so there is nothing to go on from")
    engine = conversation.engine
    with engine.lease():
        shared = common_length(engine.tokens, saved["ids"])
        if shared < engine.processed_token_count:
            # A message whose answer had not begun is forgotten, also by the engine.
            held = engine.longest_rewind(shared)
            engine.reset(held)
            engine.prefill(saved["ids"][held:shared])
    metadata = {"model": model, CONVERSATION: json.dumps(saved)}
    save_prompt_cache(path, engine, metadata)


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


_FORMS: dict[str, Callable[[Conversation, str], str]] = {".json": as_json, ".md": as_markdown}
