"""A GGUF file's vocabulary as the tokenizer files of a model folder.

Built with the ``tokenizers`` library alone: torch is not needed, and no private module of
transformers, whose place differs among the versions mlx-lm allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # how sentencepiece spells a space

# How a vocabulary's text is cut before byte-level BPE, by the name in tokenizer.ggml.pre. The
# merges of "smollm" were learned with every digit alone; without that cut "1234" would meet
# merges that training never used.
_CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": [],
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Two kinds of vocabulary are known: byte-level BPE ("gpt2") and sentencepiece's BPE with byte
    fallback ("llama"). Their decoders are the plain ones by which mlx-lm chooses its streaming
    detokenizer.

    Args:
        metadata: The file's key-value pairs; of these the ``tokenizer.ggml.*`` ones are read.

    Raises:
        ValueError: The vocabulary is of another kind, or is cut in a way not known here.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"the vocabulary is of kind {kind!r}; only byte-level BPE ('gpt2') and sentencepiece "
            "('llama') can be converted"
        )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        token = metadata["tokenizer.ggml.tokens"][bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, bos)]
        )
    return tokenizer


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, *, context_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, chat template included.

    Args:
        metadata: The file's key-value pairs.
        folder: The model folder.
        context_length: Longest sequence the model takes, in tokens.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        # The generic class takes tokenizer.json as it is. GPT2Tokenizer, made for vocabularies of
        # this kind, would put its own way of cutting text in place of the one above.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    tokens = metadata["tokenizer.ggml.tokens"]
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            config[role] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre")
    if cut not in _CUTS:
        raise ValueError(
            f"the vocabulary is cut as {cut!r}; only byte-level BPE cut as one of "
            f"{sorted(_CUTS)} can be converted"
        )
    tokens, kinds = _tokens_and_kinds(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=_ids(tokens), merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_CUTS[cut], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Sentencepiece's BPE: spaces are letters, unknown characters fall back to bytes.

    Its user-defined symbols (runs of spaces, tabs and line ends, tags) are cut out first, the
    longest at the leftmost place, and take no part in merges. Added tokens that are matched after
    normalisation do the same.
    """
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("the vocabulary wants a space before every text, which is not converted")
    tokens, kinds = _tokens_and_kinds(metadata)
    # The file spells the spaces of user-defined symbols as spaces, and all others as they are.
    tokens = [
        token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    scores = metadata["tokenizer.ggml.scores"]
    ranked = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == _NORMAL
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids(tokens),
            merges=_merges(ranked),
            unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=kind == _USER_DEFINED, special=kind == _CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary of sentencepiece implies, best first.

    Sentencepiece joins the neighbours whose union has the best score, the leftmost first; here
    every pair has a rank of its own. Two pairs with one union can compete only where they overlap,
    as (``..``, ``.``) and (``.``, ``..``) do in a run of dots. What is left over of a run stands
    at its right, so the pair with the longer left part goes first.
    """
    pairs = [
        (score, cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(token[:cut], token[cut:]) for _, cut, token in sorted(pairs, reverse=True)]


def _tokens_and_kinds(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    return metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}
