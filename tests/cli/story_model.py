"""A llama in mlx-lm's format that tells one story over and over: every test knows its next word.

The embedding is the identity and the output matrix a table of successors; the layers between are
small random noise, enough for attention to take part and not enough to change a word.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mlxspec.engine.support import model_from_config

WORDS = (
    "Once upon a time there was one quick brown fox jumping over two lazy dogs while nobody "
    "else watched them at all"
)
# "é" and the smiley were not in the tokenizer's training text: they are two and four tokens.
STORY = f"{WORDS}é!😀\n"
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CONTEXT_LENGTH = 4096
TEMPLATE = (
    "<|begin|>"
    "{% if messages[0].content == 'forbidden' %}{{ raise_exception('no such system') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ suffix }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_story_model(folder: Path, *, bare: bool = False) -> Path:
    """Write config, weights and tokenizer to a new folder.

    Args:
        folder: Where; it is made.
        bare: Give the tokenizer no chat template and no token before a text.
    """
    folder.mkdir()
    tokenizer = _tokenizer()
    story = tokenizer.encode(STORY, add_special_tokens=False).ids
    assert len(set(story)) == len(story), "a successor must be a function of the token"
    vocab_size = tokenizer.get_vocab_size()
    hidden_size = -(-vocab_size // 32) * 32
    config = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,  # quantized keys and values want groups of numbers
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, story))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if not bare:
        begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[begin]
        )
        tokenizer_config["chat_template"] = TEMPLATE
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def told(start: str, text_length: int = 10_000) -> str:
    """What the model says after a text that ends with `start`, a piece of the story.

    As mlx-lm prints it: a space that the text begins with is left out.
    """
    begin = STORY.index(start) + len(start)
    rest = STORY[begin:].removeprefix(" ")
    return (rest + STORY * (text_length // len(STORY) + 1))[:text_length]


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    # Every word once with a space before it and once without, so that each becomes one token.
    words = WORDS.split()
    tokenizer.train_from_iterator([" ".join([w, w, w]) for w in words], trainer)
    return tokenizer


def _weights(config: dict, story: list[int]) -> dict[str, mx.array]:
    """The noise of the layers, and the table of successors."""
    rng = np.random.default_rng(0)
    vocab_size, hidden_size = config["vocab_size"], config["hidden_size"]
    noise = {
        name: mx.array(rng.normal(0, 0.003, array.shape).astype(np.float32))
        for name, array in tree_flatten(model_from_config(config).parameters())
        if "layernorm" not in name
    }
    successors = np.zeros((vocab_size, hidden_size), np.float32)
    successors[story[0], :vocab_size] = 1  # whatever is not the story is followed by the story
    for token, successor in pairwise(story):
        successors[story[0], token] = 0
        successors[successor, token] = 1
    ones = mx.ones((hidden_size,))
    norms = {
        f"model.layers.{layer}.{norm}.weight": ones
        for layer in range(config["num_hidden_layers"])
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    return {
        **noise,
        **norms,
        "model.norm.weight": ones,
        "model.embed_tokens.weight": mx.eye(vocab_size, hidden_size),
        "lm_head.weight": mx.array(successors),
    }
