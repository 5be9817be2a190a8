"""A tokenizer small enough to know by heart: every byte a token, some words, an end."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"
WORDS = ["ab", "abc", "Ġthe", "Ġcat", "Ġsat"]


@cache
def byte_level_tokenizer() -> TokenizerWrapper:
    """Byte-level BPE as mlx-lm loads it, with its streaming detokenizer; 256 bytes, then words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return loaded(tokenizer, {"eos_token": END})


@cache
def sentencepiece_tokenizer() -> TokenizerWrapper:
    """Byte fallback as Gemma's: <0x00> to <0xFF>, then pieces with a lower one eighth block."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁the", "cat", "é", "שלום", "👩", "ř"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return loaded(tokenizer, {"eos_token": END})


def ids_of(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """One token per byte of the text."""
    vocabulary = tokenizer.get_vocab()
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
    # Without merges, byte-level BPE leaves the bytes apart.
    return tokenizer.encode(text, add_special_tokens=False)


def loaded(tokenizer: Tokenizer, config: dict[str, Any]) -> TokenizerWrapper:
    with TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder, "tokenizer.json")))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        return load(Path(folder))
