"""A chat as the text that the model's own template makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What is ours to say where a chat is rendered: the turns, whether an answer is to come or is begun,
# and that text comes back, uncut.
_OURS = {
    *("self", "conversation", "messages", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}


def require_free_variables(name: str, variables: Iterable[str]) -> None:
    """Refuse variables that are set where a chat is rendered.

    Args:
        name: How the message calls them.
        variables: Names of the caller's variables.

    Raises:
        ValueError: Names the first that is ours, or is no name.
    """
    for variable in variables:
        if not isinstance(variable, str):
            raise ValueError(f"{name}: expected names of variables, got {variable!r}")
        if variable in _OURS:
            raise ValueError(f"{name}: {variable!r} is set by mlxspec itself; leave it out")


def rendered_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    variables: Mapping[str, Any] | None = None,
    *,
    unended: bool = False,
) -> str:
    """The text of a chat up to where the model goes on.

    Args:
        tokenizer: The model's, with a chat template.
        messages: Turns, each with "role" and "content".
        variables: More variables for the template.
        unended: The model goes on with the last message, instead of answering it.

    Raises:
        ValueError: The template does not take the chat.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not unended,
            continue_final_message=unended,
            **(variables or {}),
        )
    except Exception as problem:  # a template is a program of the model's, and may raise anything
        from jinja2 import TemplateError

        # These speak for themselves; of another one the text may be a mere name.
        plain = isinstance(problem, TemplateError | TypeError | ValueError)
        reason = problem if plain else repr(problem)
        raise ValueError(f"the model's chat template refuses this chat: {reason}") from problem
    return text
