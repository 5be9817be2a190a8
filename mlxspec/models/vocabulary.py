"""Whether two models mean the same by their token ids: a draft model's are fed to the target."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.errors import VocabularyMismatch

# Rows of logits that two models of one tokenizer may differ by: embeddings are padded to multiples
# of 64 to 1024 (Qwen2.5: 151 936 rows and 152 064 for the same 151 665 tokens).
_MOST_PADDING = 1024
# How many tokens an error names.
_NAMED = 5

_ATTRIBUTE = "_mlxspec_tokenizer"
# Pairs that were found to agree: comparing a quarter of a million texts takes a tenth of a second.
_AGREE: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


class _Kept:
    """A tokenizer beside its model; a copy of the model has the same."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


def remember_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Note whose tokenizer this is, for whoever is later given the model alone."""
    model.__dict__[_ATTRIBUTE] = _Kept(tokenizer)


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer that was remembered with a model, or None."""
    kept = model.__dict__.get(_ATTRIBUTE)
    return None if kept is None else kept.tokenizer


def require_same_vocabulary(
    vocab_size: int, tokenizer: Any, draft_vocab_size: int, draft_tokenizer: Any
) -> None:
    """Refuse a draft model whose ids do not mean what the target's mean.

    Every id that both tokenizers have must stand for the same text, special tokens must stand at
    the same ids, and those that begin and end the target's texts must be there. The sizes of the
    embeddings may differ, which are padded as each model likes, and ids that only one of the two
    has do no harm: they are not proposed.

    Args:
        vocab_size: Entries in a row of the target's logits.
        tokenizer: The target's, mlx-lm's wrapper or one of transformers; None: not known.
        draft_vocab_size: Entries in a row of the draft model's logits.
        draft_tokenizer: The draft model's; None: not known. Where one of the two is not, only
            the sizes are compared, which may differ by padding and no more.

    Raises:
        VocabularyMismatch: Names the tokens that differ, or the sizes.
    """
    if tokenizer is not None and draft_tokenizer is not None:
        require_same_tokens(tokenizer, draft_tokenizer)
    elif abs(vocab_size - draft_vocab_size) > _MOST_PADDING:
        raise VocabularyMismatch(
            f"draft model: expected the target's vocabulary of {vocab_size} ids, got one of "
            f"{draft_vocab_size}, and padding does not explain that; take a draft model of the "
            "target's family"
        )


def require_same_tokens(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse two tokenizers of which one id means two things.

    Raises:
        VocabularyMismatch: Names the first tokens that differ.
    """
    target, draft = _bare(tokenizer), _bare(draft_tokenizer)
    if target is draft or draft in _AGREE.get(target, ()):
        return
    theirs, ours = _texts(target), _texts(draft)
    differing = [
        f"{token} is {theirs[token]!r} in the target and {ours[token]!r} in the draft model"
        for token in sorted(theirs.keys() & ours.keys())
        if theirs[token] != ours[token]
    ]
    kind = "tokens"
    if not differing:
        kind = "special tokens"
        differing = [
            f"{text!r} is {_id(there)} in the target and {_id(here)} in the draft model"
            for text, there, here in _special_tokens(target, draft, theirs, ours)
        ]
    if differing:
        more = len(differing) - _NAMED
        raise VocabularyMismatch(
            f"draft model: {len(differing)} {kind} differ from the target's: "
            f"{'; '.join(differing[:_NAMED])}{f'; and {more} more' if more > 0 else ''}. Take a "
            "draft model with the target's tokenizer"
        )
    _AGREE.setdefault(target, weakref.WeakSet()).add(draft)


def _special_tokens(
    target: Any, draft: Any, theirs: dict[int, str], ours: dict[int, str]
) -> list[tuple[str, int | None, int | None]]:
    """Special tokens, by text, that stand at another id in the other tokenizer.

    The tokens that begin and end the target's texts may not be missing either.
    """
    there = {text: token for token, text in theirs.items()}
    here = {text: token for token, text in ours.items()}
    needed = {target.bos_token, target.eos_token} - {None}
    special = sorted({*target.all_special_tokens, *draft.all_special_tokens} - needed)
    return [
        (text, there.get(text), here.get(text))
        for text in [*sorted(needed), *special]
        if there.get(text) != here.get(text)
        and (text in needed or (text in there and text in here))
    ]


def _texts(tokenizer: Any) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab().items()}


def _id(token: int | None) -> str:
    return "missing" if token is None else str(token)


def _bare(tokenizer: Any) -> Any:
    """The tokenizer of transformers inside mlx-lm's wrapper, which may be a new one every time."""
    return tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
