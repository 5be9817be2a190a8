"""Text: pieces that join to the whole for any blocks, and stop strings at every row."""

from __future__ import annotations

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxspec
from mlxspec import SpeculationStats
from mlxspec.decoding.stops import StopStrings
from tests.decoding.text import byte_level_tokenizer, ids_of, sentencepiece_tokenizer
from tests.hostile import PlannedDrafter, plans
from tests.scripted import ScriptedEngine

TOKENIZERS = {"byte-level": byte_level_tokenizer, "byte fallback": sentencepiece_tokenizer}
HARD = [
    "x👩‍👩‍👧‍👦 family",
    "é ř ů",
    "שלום עולם",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "naïve e\u0301 combining",
    "x\n\n y\t z  two  spaces ",
    "日本語🇨🇿ok",
]
texts = st.one_of(st.sampled_from(HARD), st.text(st.characters(codec="utf-8"), max_size=12)).map(
    # mlx-lm's detokenizers drop a space before the first word; that is tested by itself.
    lambda text: "x" + text
)


def stream(tokenizer, text, plan, *, prompt=(1, 2), end=True, **options):
    """Every response of a model that says this text, drafted by a plan."""
    said = ids_of(tokenizer, text) + ([tokenizer.eos_token_id] if end else [])
    script = [*prompt, *said]
    engine = ScriptedEngine(script, len(tokenizer))
    drafter = PlannedDrafter(script, plan, len(tokenizer))
    responses = list(
        mlxspec.stream_generate(
            nn.Module(),
            tokenizer,
            list(prompt),
            max_tokens=options.pop("max_tokens", -1),
            engine=engine,
            drafter=drafter,
            **options,
        )
    )
    return responses, engine, said


@given(kind=st.sampled_from(sorted(TOKENIZERS)), text=texts, plan=plans())
def test_streamed_pieces_join_to_the_decoded_whole_for_any_blocks(kind, text, plan):
    tokenizer = TOKENIZERS[kind]()
    responses, engine, said = stream(tokenizer, text, plan)
    assert [response.token for response in responses] == said
    assert "".join(response.text for response in responses) == text
    assert text == tokenizer.decode(said[:-1])
    assert responses[-1].finish_reason == "stop"
    assert list(engine.tokens) == [1, 2, *said[:-1]]


@given(kind=st.sampled_from(sorted(TOKENIZERS)), text=texts, plan=plans(), data=st.data())
def test_a_stop_string_ends_text_ids_and_state_at_the_same_token(kind, text, plan, data):
    tokenizer = TOKENIZERS[kind]()
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : data.draw(st.integers(begin + 1, len(text)))]
    others = data.draw(st.lists(st.sampled_from(["\x00never", "zzzzzz"]), max_size=2))
    stats = SpeculationStats()
    responses, engine, said = stream(
        tokenizer, text, plan, stop_strings=[*others, stop], stats=stats
    )
    joined = "".join(response.text for response in responses)
    assert joined == text[: text.index(stop)]
    assert responses[-1].finish_reason == "stop"
    needed = len((joined + stop).encode())
    ids = [response.token for response in responses]
    assert ids == said[:needed]
    assert stats.emitted == needed
    assert list(engine.tokens) == [1, 2, *ids[:-1]]


@given(text=texts, plan=plans(), data=st.data())
def test_a_stop_inside_the_token_limit_wins_and_one_past_it_does_not(text, plan, data):
    tokenizer = byte_level_tokenizer()
    count = len(ids_of(tokenizer, text))
    limit = data.draw(st.integers(1, count + 1))
    responses, engine, said = stream(tokenizer, text, plan, max_tokens=limit)
    assert len(responses) == min(limit, count + 1)
    assert responses[-1].finish_reason == ("stop" if limit == count + 1 else "length")
    assert list(engine.tokens) == [1, 2, *said[: len(responses) - 1]]
    stop = text[-1]
    responses, _, _ = stream(tokenizer, text, plan, max_tokens=limit, stop_strings=[stop])
    cut = len(text[: text.index(stop) + 1].encode())
    assert len(responses) == min(limit, cut)
    assert responses[-1].finish_reason == ("stop" if cut <= limit else "length")


def test_text_held_back_for_a_stop_string_is_given_out_when_it_is_none():
    responses, _, _ = stream(
        byte_level_tokenizer(), "xEND of ENDING EN", [("right", 5)], stop_strings=["ENDED"]
    )
    assert "".join(response.text for response in responses) == "xEND of ENDING EN"


def test_a_character_cut_by_the_limit_is_not_lost_silently():
    responses, _, said = stream(
        byte_level_tokenizer(), "x👩", [("right", 3)], end=False, max_tokens=3
    )
    assert "".join(response.text for response in responses) == "x\N{REPLACEMENT CHARACTER}"
    assert [response.token for response in responses] == said[:3]


@given(
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_filter_gives_the_text_before_the_first_stop_string(strings, pieces):
    text = "".join(pieces)
    found = [text.index(string) for string in strings if string in text]
    filtered = StopStrings(strings)
    given_out = "".join(filtered.feed(piece) for piece in pieces) + filtered.feed("", last=True)
    whole = text[: min(found)] if found else text
    # A longer string that ends later may begin earlier; the first one completed ends the text.
    assert whole == given_out or (found and given_out.startswith(whole) and filtered.found)
    assert (filtered.found is not None) == bool(found)
    assert not any(string in given_out for string in strings)


@pytest.mark.parametrize("strings", ["stop", [""], [3], [None]])
def test_stop_strings_that_are_none_are_refused(strings):
    with pytest.raises(ValueError, match="stop_strings"):
        StopStrings(strings)


def test_every_end_token_of_the_tokenizer_ends_the_text():
    tokenizer = byte_level_tokenizer()
    responses, _, _ = stream(tokenizer, "xyz", [("right", 4)])
    assert [response.text for response in responses if response.text] == ["x", "y", "z"]
    assert responses[-1].token == tokenizer.eos_token_id
    assert responses[-1].text == ""
