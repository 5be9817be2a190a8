"""The errors of mlxspec: each says what was expected, what came, and what to do."""

from __future__ import annotations


def in_words(error: BaseException) -> str:
    """What an error says, or its name where it says nothing."""
    return str(error) or type(error).__name__


class MlxspecError(Exception):
    """Base class of the errors below, so that a caller can catch them together."""


class UnsupportedModel(MlxspecError, ValueError):
    """The static engine cannot take this model; the message names the family and the reason."""


class ModelNotFound(MlxspecError, ValueError):
    """No model under that name: not a demo model, not a folder with a model, not on the hub."""


class DemoModelError(MlxspecError, RuntimeError):
    """A demo model could not be fetched, checked or converted; nothing half made is left."""


class VocabularyMismatch(MlxspecError, ValueError):
    """A draft model's token ids mean something else than the target's; the message names some."""


class EngineBusy(MlxspecError, RuntimeError):
    """One engine serves one sequence, and somebody else is using this one."""


class RewindRefused(MlxspecError, RuntimeError):
    """The state lacks what a rewind needs; the engine is as it was, unless the message says so."""


class PromptCacheError(MlxspecError, ValueError):
    """A file is no prompt cache that this engine can go on from; the engine is as it was."""


class NonFiniteLogits(MlxspecError, ArithmeticError):
    """A row of logits holds no number at all, so there is no next token to choose."""


class GrammarError(MlxspecError, ValueError):
    """No grammar, one that is not supported or that no text satisfies, or a text that left it."""


class DrafterError(MlxspecError, ValueError):
    """A drafter proposed something that is not a sequence of token ids of the target."""


class ContextFull(MlxspecError, ValueError):
    """A conversation has outgrown the context; the message says by how much, and what to do."""
