"""A GGUF file's vocabulary as the tokenizer files of a model folder.

Built with the ``tokenizers`` library alone: torch is not needed, and no private module of
transformers, whose place differs among the versions mlx-lm allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# How a vocabulary's text is cut before byte-level BPE, by the name in tokenizer.ggml.pre. The
# merges of "smollm" were learned with every digit alone; without that cut "1234" would meet
# merges that training never used.
_CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": [],
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from a GGUF file's metadata.

    Its decoder is plain byte level, which is what mlx-lm looks for to choose its streaming
    detokenizer for BPE.

    Args:
        metadata: The file's key-value pairs; of these the ``tokenizer.ggml.*`` ones are read.

    Raises:
        ValueError: The vocabulary is of another kind, or is cut in a way not known here.
    """
    kind, cut = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _CUTS:
        raise ValueError(
            f"the vocabulary is of kind {kind!r} cut as {cut!r}; only byte-level BPE ('gpt2') cut "
            f"as one of {sorted(_CUTS)} can be converted"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_CUTS[cut], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    whole = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)
    return tokenizer


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, *, context_length: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, chat template included.

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
