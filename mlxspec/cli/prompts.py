"""From the prompt options to token ids, as mlx-lm's command makes them."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from mlxspec.chat_template import rendered_chat
from mlxspec.cli.exits import UsageError
from mlxspec.cli.values import unescaped

_STAND_IN = "<query>"


def prompt_text(prompt: str) -> str:
    r"""The text that `--prompt` stands for: stdin for "-", else itself with \n and \t replaced.

    Raises:
        UsageError: stdin is empty or is not UTF-8.
    """
    if prompt != "-":
        return unescaped(prompt)
    if sys.stdin is None:
        raise UsageError("--prompt -: stdin is closed; give the prompt as --prompt TEXT")
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError:
        raise UsageError("--prompt -: expected text in UTF-8 on stdin, got other bytes") from None
    if not text.strip():
        raise UsageError("--prompt -: expected a prompt on stdin, got nothing")
    return text


def prompt_ids(tokenizer: Any, text: str, args: Namespace) -> list[int]:
    """Token ids of the prompt, within the chat template if there is one and it is wanted.

    Raises:
        UsageError: The chat template does not take the messages.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=True)
    chat = _chat(tokenizer, _messages(text, args), args)
    return tokenizer.encode(chat, add_special_tokens=False)


def suffix_ids(tokenizer: Any, text: str, args: Namespace) -> list[int]:
    """Token ids of a prompt that goes on from a cached one: what the template puts after it too.

    Raises:
        UsageError: The chat template does not take the messages, or hides the prompt.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=False)
    # mlx-lm's way: where another text in its place begins, the prompt begins.
    begin = _chat(tokenizer, _messages(_STAND_IN, args), args).find(_STAND_IN)
    if begin < 0:
        raise UsageError(
            "the model's chat template does not show the prompt as it is, so nothing can go on "
            "from a cached one; give --ignore-chat-template"
        )
    chat = _chat(tokenizer, _messages(text, args), args)
    return tokenizer.encode(chat[begin:], add_special_tokens=False)


def beginning_ids(tokenizer: Any, text: str, args: Namespace) -> list[int]:
    """Token ids of a prompt that another will go on from: a message that is not ended.

    Raises:
        UsageError: The chat template does not take the messages.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=True)
    chat = _chat(tokenizer, _messages(text, args), args, unended=True)
    return tokenizer.encode(chat, add_special_tokens=False)


def refuse_length(ids: list[int], context_length: int, *, before: int = 0) -> None:
    """Refuse a prompt without tokens, or one that leaves no room for an answer.

    Args:
        ids: Its tokens.
        context_length: Most tokens of prompt and answer.
        before: Tokens that stand before it.

    Raises:
        UsageError: Says how long the prompt is and how long it may be.
    """
    if not ids:
        raise UsageError("--prompt: expected at least one token, got an empty prompt")
    if before + len(ids) >= context_length:
        cached = f" after the {before} cached" if before else ""
        raise UsageError(
            f"--prompt: {len(ids)} tokens{cached} leave no room for an answer in a context of "
            f"{context_length}; shorten the prompt, or raise --max-context-length"
        )


def _messages(text: str, args: Namespace) -> list[dict[str, str]]:
    contents = (
        ("system", args.system_prompt),
        ("user", text),
        ("assistant", args.prefill_response),
    )
    return [{"role": role, "content": text} for role, text in contents if text is not None]


def _chat(
    tokenizer: Any, messages: list[dict[str, str]], args: Namespace, *, unended: bool = False
) -> str:
    prefilled = unended or args.prefill_response is not None
    try:
        return rendered_chat(tokenizer, messages, args.chat_template_config, unended=prefilled)
    except ValueError as problem:
        raise UsageError(
            f"{problem}; change --system-prompt or --chat-template-config, or give "
            "--ignore-chat-template"
        ) from problem
