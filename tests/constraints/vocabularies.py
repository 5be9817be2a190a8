"""Small tokenizers with merges that JSON is written in, as those of real models."""

from __future__ import annotations

import json
from functools import cache

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.decoding.text import END, byte_level_tokenizer, loaded

_TEXTS = [
    json.dumps({"name": "Margit Aune", "age": 41, "ok": True, "tags": ["a", "b"], "city": None}),
    json.dumps({"name": "Ada", "born": 1815, "red": False, "items": [{"id": 1}, {"id": 20}]}),
    "2024-05-17 the cat sat on the mat; yes, no, maybe",
]
# More rows of logits than any of these tokenizers has tokens, as padded embeddings have.
PADDED_SIZE = 448


@cache
def byte_level_merges() -> TokenizerWrapper:
    """Byte-level BPE whose tokens join quotes, colons, brackets and beginnings of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken("<other>")])
    return loaded(tokenizer, {"eos_token": END})


@cache
def byte_fallback_merges() -> TokenizerWrapper:
    """Sentencepiece's manner: spaces are letters, unknown characters are bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        _TEXTS * 3, trainers.BpeTrainer(vocab_size=140, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return loaded(tokenizer, {"eos_token": END})


@cache
def prefixed_merges() -> TokenizerWrapper:
    """Byte fallback that puts a space before every text, as Llama 2's."""
    tokenizer = Tokenizer.from_str(byte_fallback_merges()._tokenizer.backend_tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return loaded(tokenizer, {"eos_token": END})


VOCABULARIES = {
    "byte-level": byte_level_merges,
    "byte fallback": byte_fallback_merges,
    "prefixed": prefixed_merges,
    "bytes": byte_level_tokenizer,
}
