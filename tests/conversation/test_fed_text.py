"""Known ids are fed again exactly as far as the rendered text is the known one."""

from __future__ import annotations

from mlxspec.conversation.fed_text import FedText


def encode(text: str) -> list[int]:
    """Pairs of small letters are one token, everything else is one by itself."""
    ids, i = [], 0
    while i < len(text):
        width = 2 if all("a" <= c <= "z" for c in (text + "..")[i : i + 2]) else 1
        ids.append(int.from_bytes(text[i : i + width].encode(), "big"))
        i += width
    return ids


def test_emitted_ids_stay_where_the_text_is_the_same() -> None:
    asked = FedText().rendered_anew("U:hi.", encode)
    assert asked.ids == encode("U:hi.")
    # The model wrote letters one by one, which the tokenizer would join.
    answered = asked.extended("abcd", encode("a") + encode("b") + encode("cd"))
    again = answered.rendered_anew("U:hi.abcd#U:x.", encode)
    assert again.ids == [*answered.ids, *encode("#U:x.")]


def test_a_template_that_changes_the_answer_gets_the_tokenizer_s_ids_from_there_on() -> None:
    answered = FedText().rendered_anew("U:hi.", encode).extended("abc ", [7])
    for text in ("U:hi.abc#U:x.", "U:hi.c#U:x.", "S.U:hi.abc #U:x."):
        assert answered.rendered_anew(text, encode).ids == encode(text)


def test_a_tokenizer_that_joins_over_the_end_of_an_answer_is_left_to_it() -> None:
    answered = FedText().rendered_anew("U:hi.", encode).extended("abc", [7])
    text = "U:hi.abcde."
    assert answered.rendered_anew(text, encode).ids == encode(text)


def test_what_was_known_before_a_change_stays_known_after_it() -> None:
    first = FedText().rendered_anew("U.", encode).extended("ab", [1, 2])
    second = first.rendered_anew("U.ab#V.", encode).extended("<x>cd", [3, 4])
    # The thought of the second answer is gone; the first answer is as it was emitted.
    third = second.rendered_anew("U.ab#V.cd#W.", encode)
    assert third.ids == [*encode("U."), 1, 2, *encode("#V.cd#W.")]
    assert third.cuts[-1] == (len(third.text), len(third.ids))
