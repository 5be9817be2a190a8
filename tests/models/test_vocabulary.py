"""A draft model of another vocabulary is refused, by the names of the tokens, before a token."""

from __future__ import annotations

import copy

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import mlxspec
from mlxspec import DraftModel, VocabularyMismatch
from mlxspec.models.vocabulary import (
    remember_tokenizer,
    require_same_tokens,
    require_same_vocabulary,
    tokenizer_of,
)
from tests.families.tiny import tiny_model

WORDS = ["<s>", "</s>", "a", "b", "c", "d", "e", "f", "g", "h"]


def tokenizer(words=WORDS, **special):
    vocabulary = {word: i for i, word in enumerate(words) if word is not None}
    special = {"bos_token": "<s>", "eos_token": "</s>"} | special
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def test_tokenizers_with_the_same_texts_agree_wrapped_or_not():
    one, other = tokenizer(), tokenizer()
    require_same_tokens(one, other)
    require_same_tokens(TokenizerWrapper(one), other)
    require_same_tokens(one, one)


def test_tokens_at_the_end_that_one_of_the_two_lacks_do_no_harm():
    more = tokenizer([*WORDS, "i", "<pad>"], pad_token="<pad>")
    require_same_tokens(tokenizer(), more)
    require_same_tokens(more, tokenizer())


def test_the_tokens_that_differ_are_named_and_counted():
    other = tokenizer(["<s>", "</s>", "a", "B", "c", "D", *WORDS[6:]])
    with pytest.raises(VocabularyMismatch) as refusal:
        require_same_tokens(tokenizer(), other)
    message = str(refusal.value)
    assert "2 tokens differ" in message
    assert "3 is 'b' in the target and 'B' in the draft model" in message
    assert "5 is 'd' in the target and 'D' in the draft model" in message
    turned = tokenizer([*WORDS[:2], *reversed(WORDS[2:])])
    with pytest.raises(VocabularyMismatch, match=r"8 tokens differ.*; and 3 more"):
        require_same_tokens(tokenizer(), turned)


def test_special_tokens_must_stand_at_the_same_ids():
    moved = tokenizer([*WORDS, None, "<pad>"], pad_token="<pad>")
    pad = tokenizer([*WORDS, "<pad>"], pad_token="<pad>")
    with pytest.raises(VocabularyMismatch, match="'<pad>' is 10 in the target and 11 in the draft"):
        require_same_tokens(pad, moved)
    ends = tokenizer([*WORDS, "<end>"], eos_token="<end>")
    with pytest.raises(VocabularyMismatch, match="'<end>' is 10 in the target and missing in the"):
        require_same_tokens(ends, tokenizer())


def test_without_tokenizers_sizes_may_differ_by_padding_and_no_more():
    require_same_vocabulary(151_936, None, 152_064, None)
    require_same_vocabulary(152_064, tokenizer(), 151_936, None)
    with pytest.raises(VocabularyMismatch, match="vocabulary of 32000 ids, got one of 50257"):
        require_same_vocabulary(32_000, None, 50_257, tokenizer())
    require_same_vocabulary(32_000, tokenizer(), 50_257, tokenizer())


def test_a_model_remembers_its_tokenizer_and_a_copy_of_it_does_too():
    model, known = tiny_model("llama"), tokenizer()
    assert tokenizer_of(model) is None
    remember_tokenizer(model, known)
    assert tokenizer_of(model) is known
    assert tokenizer_of(copy.deepcopy(model)) is known
    assert DraftModel(model).tokenizer is known


@pytest.mark.parametrize("known", ["both remembered", "given to the drafter", "given at the call"])
def test_generation_is_refused_before_a_token_and_the_engine_is_unchanged(known):
    target, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    ours, theirs = tokenizer(), tokenizer([*WORDS[:4], "x", *WORDS[5:]])
    engine = mlxspec.StaticShapeEngine(target, max_context_length=40)
    engine.prefill([1, 2])
    options = {"engine": engine}
    if known != "given to the drafter":
        remember_tokenizer(draft, theirs)
        options["draft_model"] = draft
    else:
        options["drafter"] = mlxspec.Chain(
            mlxspec.PromptLookup(), DraftModel(draft, tokenizer=theirs)
        )
    if known == "given at the call":
        with pytest.raises(VocabularyMismatch, match="4 is 'c' in the target and 'x'"):
            mlxspec.stream_generate(target, ours, [1, 2, 3], **options)
    else:
        remember_tokenizer(target, ours)
        with pytest.raises(VocabularyMismatch, match="4 is 'c' in the target and 'x'"):
            mlxspec.generate_step([1, 2, 3], target, **options)
    assert list(engine.tokens) == [1, 2]
    assert not engine.leased
