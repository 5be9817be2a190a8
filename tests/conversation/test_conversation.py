"""A conversation's turns are a fresh run's on the same ids, and nothing that was said is lost."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec import (
    ContextFull,
    Conversation,
    EngineBusy,
    PromptLookup,
    SpeculationStats,
    StaticShapeEngine,
)
from mlxspec.conversation import resume_conversation, save_conversation
from mlxspec.engine.costs import CANDIDATE_WIDTHS, TileCosts
from mlxspec.errors import PromptCacheError
from mlxspec.generation import stream_generate
from mlxspec.prompt_cache import save_prompt_cache
from tests.cases import varied_model
from tests.cli.story_model import STORY, TEMPLATE, WORDS

MESSAGES = ["Once upon a", "one quick brown fox jumping", f"{WORDS} at all {WORDS}", "two"]
LINES = TEMPLATE.replace("<|end|>{% endif %}", "<|end|>\n{% endif %}")
TEMPLATES = {
    "verbatim": TEMPLATE,
    "a line end after every end": LINES,
    "another end than the model's": TEMPLATE.replace("<|end|>", "<|system|>"),
    "strips spaces": TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "strips thoughts": TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content.split('dogs')[-1] if m.role == 'assistant' else m.content }}",
    ),
    "opens the answer": TEMPLATE.replace(
        "<|assistant|>{% endif %}", "<|assistant|>dogs {% endif %}"
    ),
    "counts its messages": TEMPLATE.replace("<|begin|>", "<|begin|>{{ messages | length }} "),
}
# Templates that render an answer as it was emitted: nothing that was fed changes.
KEEP = ("verbatim", "a line end after every end")


def say(conversation: Conversation, message: str) -> tuple[str, list[int]]:
    responses = list(conversation.reply(message))
    return "".join(r.text for r in responses), [r.token for r in responses]


def fresh(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> list[int]:
    engine = StaticShapeEngine(model)
    return [r.token for r in stream_generate(model, tokenizer, prompt, engine=engine, **options)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_those_of_a_fresh_run_with_and_without_drafts(
    name: str, teller: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    tokenizer._tokenizer.chat_template = TEMPLATES[name]
    runs = {}
    for drafting in ({}, {"prompt_lookup": True}):
        del fed[:]
        conversation = Conversation(teller, tokenizer, max_tokens=40, **drafting)
        answers = [say(conversation, message) for message in MESSAGES]
        for prompt, (_, tokens) in zip(fed, answers, strict=True):
            assert tokens == fresh(teller, tokenizer, prompt, max_tokens=40)
        assert list(conversation.engine.tokens) == [*fed[-1], *answers[-1][1][:-1]]
        assert [turn.answer for turn in conversation.turns] == [text for text, _ in answers]
        runs[bool(drafting)] = list(fed), answers
    assert runs[True] == runs[False]
    assert conversation.stats.accepted > 0


@pytest.mark.usefixtures("adaptive_by_default")
def test_an_engine_of_its_own_is_widened_where_drafts_pay_in_wider_tiles(
    monkeypatch: pytest.MonkeyPatch, teller: Any, engine: Any, tokenizer: Any
) -> None:
    cheap = TileCosts(tuple((width, 1.0 + 0.01 * width) for width in CANDIDATE_WIDTHS))
    monkeypatch.setattr("mlxspec.engine.survey.remembered_costs", lambda circumstances: cheap)
    narrow = StaticShapeEngine(teller).tile_widths
    wide = StaticShapeEngine(teller).widened().tile_widths
    assert wide[-1] > narrow[-1]
    runs = []
    for options, widths in (
        ({}, narrow),
        ({"prompt_lookup": True}, wide),
        ({"prompt_lookup": True, "num_draft_tokens": 3}, narrow),
        ({"prompt_lookup": True, "num_draft_tokens": 0}, narrow),
        ({"prompt_lookup": True, "adaptive_draft_count": False}, narrow),
    ):
        conversation = Conversation(teller, tokenizer, max_tokens=40, **options)
        assert conversation.engine.tile_widths == widths
        runs.append([say(conversation, message) for message in MESSAGES[:2]])
    assert all(run == runs[0] for run in runs)
    # Whoever brings an engine has chosen it.
    given = Conversation(teller, tokenizer, engine=engine, prompt_lookup=True)
    assert given.engine is engine


@pytest.mark.parametrize("policy", ["stop", "trim"])
def test_sampled_turns_are_the_same_with_and_without_drafts(
    policy: Any, teller: Any, tokenizer: Any
) -> None:
    runs = []
    for drafting in ({}, {"drafter": PromptLookup(1), "num_draft_tokens": 5}):
        engine = StaticShapeEngine(teller, max_context_length=200 if policy == "stop" else 100)
        options = {"temp": 2.5, "seed": 3, "context_policy": policy, "max_tokens": 30, **drafting}
        conversation = Conversation(teller, tokenizer, engine=engine, **options)
        for message in (*MESSAGES[:2], *MESSAGES[:2]):
            say(conversation, message)
        runs.append(([turn.answer for turn in conversation.turns], conversation.dropped_turns))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 1
    assert conversation.stats.accepted > 0
    assert (conversation.dropped_turns > 0) == (policy == "trim")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_model_is_fed_what_the_template_renders(
    name: str, teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    tokenizer._tokenizer.chat_template = TEMPLATES[name]
    conversation = Conversation(teller, tokenizer, engine=engine, system_prompt="Tell.")
    emitted = []
    for message in MESSAGES:
        messages = [*conversation.messages, {"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        emitted.append(say(conversation, message)[1])
        assert tokenizer.decode(fed[-1]) == text
    if name in KEEP:
        for before, tokens, after in zip(fed, emitted, fed[1:], strict=False):
            assert after[: len(before) + len(tokens)] == before + tokens
        for turn, before, tokens in zip(conversation.turns[1:], fed, emitted, strict=False):
            # All that was processed: the last token of an answer was only emitted.
            assert turn.stats.reused_tokens == len(before) + len(tokens) - 1


@pytest.mark.parametrize(("stop", "text", "count"), [((), "Once", 4), (["ce"], "On", 2)])
def test_ids_that_the_tokenizer_would_not_choose_are_fed_as_they_were_emitted(
    stop: Any, text: str, count: int, teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    """A processor makes the model spell a word that the tokenizer has whole."""
    spelt = tokenizer.convert_tokens_to_ids(list("Once"))
    assert tokenizer.encode(text, add_special_tokens=False) != spelt[:count]

    def spell(tokens: mx.array, logits: mx.array) -> mx.array:
        written = tokens.shape[0] - len(fed[-1])
        wanted = mx.arange(logits.shape[-1]) == [*spelt, tokenizer.eos_token_id][written]
        return mx.where(wanted, 0.0, -1e9)[None]

    options = {"logits_processors": [spell], "stop_strings": stop}
    conversation = Conversation(teller, tokenizer, engine=engine, **options)
    end = [] if stop else [tokenizer.eos_token_id]
    assert say(conversation, "two") == (text, [*spelt, *end])
    say(conversation, "dogs")
    after = [*fed[0], *spelt[:count], tokenizer.eos_token_id]
    assert fed[1][: len(after)] == after


@pytest.mark.parametrize("drafting", [{"stop_strings": ["at all of"]}, {"prompt_lookup": True}])
def test_an_answer_stopped_anywhere_stays_as_far_as_it_came_and_the_next_turn_is_right(
    drafting: dict, teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    whole = [r.token for r in Conversation(teller, tokenizer, engine=engine).reply(STORY)]
    for count in range(1, len(whole) + 1):
        conversation = Conversation(teller, tokenizer, engine=engine, **drafting)
        responses = conversation.reply(STORY)
        tokens = [next(responses).token for _ in range(count)]
        responses.close()
        (turn,) = conversation.turns
        assert STORY.startswith(turn.answer)
        assert turn.ending == ("interrupted" if count < len(whole) else "stop")
        assert turn.stats.emitted == count
        _, after = say(conversation, "two")
        said = tokens[:-1] if count == len(whole) else tokens
        # Only an unfinished character is left out.
        assert turn.answer == tokenizer.decode(said).rstrip("\ufffd")
        known = tokenizer.encode(turn.answer, add_special_tokens=False)
        assert fed[-1][: len(fed[-2]) + len(known)] == fed[-2] + said[: len(known)]
        assert after == fresh_tokens(teller, tokenizer, fed[-1])


_FRESH: dict[tuple[int, ...], list[int]] = {}


def fresh_tokens(model: Any, tokenizer: Any, prompt: list[int]) -> list[int]:
    """As `fresh`, on an engine kept with the model, which begins anew every time."""
    key = tuple(prompt)
    if key not in _FRESH:
        _FRESH[key] = [r.token for r in stream_generate(model, tokenizer, prompt)]
    return _FRESH[key]


def test_nothing_is_kept_of_a_turn_whose_answer_had_not_begun(
    teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine)
    say(conversation, "two")
    conversation.reply("dogs").close()

    def stop(processed: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(conversation.reply("dogs", prompt_progress_callback=stop))
    assert [turn.message for turn in conversation.turns] == ["two"]
    _, tokens = say(conversation, "dogs")
    assert tokens == fresh_tokens(teller, tokenizer, fed[-1])


def test_a_stop_string_ends_an_answer_and_is_not_in_the_conversation(
    teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine, stop_strings=["wn fox ju"])
    text, tokens = say(conversation, "two")
    assert text == conversation.turns[0].answer == "Once upon a time there was one quick bro"
    say(conversation, "dogs")
    assert tokenizer.decode(fed[1]).startswith(f"{tokenizer.decode(fed[0])}{text}<|end|>")
    # As emitted up to the token that the text ends within.
    assert fed[1][: len(fed[0]) + 8] == fed[0] + tokens[:8]
    assert conversation.turns[0].ending == "stop"


def test_a_conversation_says_why_every_answer_ended(teller: Any, tokenizer: Any) -> None:
    engine = StaticShapeEngine(teller, max_context_length=64)
    conversation = Conversation(teller, tokenizer, engine=engine, max_tokens=5)
    say(conversation, "two")
    conversation.max_tokens = -1
    say(conversation, "dogs")
    say(conversation, "two")
    assert [turn.ending for turn in conversation.turns] == ["max_tokens", "stop", "context"]
    assert len(engine.tokens) == 63


def test_a_second_reply_before_the_first_has_ended_is_refused_and_costs_nothing(
    teller: Any, engine: Any, tokenizer: Any
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine)
    responses = conversation.reply("two")
    text = next(responses).text
    with pytest.raises(EngineBusy):
        conversation.reply("dogs")
    assert text + "".join(r.text for r in responses) == STORY
    assert [turn.message for turn in conversation.turns] == ["two"]


def test_reset_begins_anew_with_the_system_prompt(
    teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine, system_prompt="Tell.")
    say(conversation, "two")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Tell."}]
    assert conversation.stats == SpeculationStats()
    say(conversation, "two")
    assert fed[0] == fed[1]


def test_counters_are_added_up_over_the_turns(teller: Any, engine: Any, tokenizer: Any) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine, prompt_lookup=True)
    for message in MESSAGES:
        say(conversation, message)
    parts = [turn.stats for turn in conversation.turns]
    for name in ("rounds", "forwards", "prompt_tokens", "drafted", "accepted", "emitted"):
        assert getattr(conversation.stats, name) == sum(getattr(part, name) for part in parts) > 0
    assert conversation.stats.seconds["verify"] == sum(part.seconds["verify"] for part in parts)
    assert conversation.stats.why_off is None


def test_without_a_template_the_conversation_is_one_running_text(
    teller: Any, engine: Any, tokenizer: Any, fed: list[list[int]]
) -> None:
    conversation = Conversation(
        teller, tokenizer, engine=engine, max_tokens=4, use_chat_template=False
    )
    assert say(conversation, "Once upon")[0] == "a time there was"
    assert conversation.turns[0].answer == " a time there was"
    say(conversation, "two")
    assert tokenizer.decode(fed[1]) == "<|begin|>Once upon a time there was\ntwo"
    assert fed[1][: len(fed[0])] == fed[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_policy": "forget"}, "context_policy: expected one of stop, trim, got 'forget'"),
        ({"max_tokens": 0}, "max_tokens: 0 would emit nothing"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number"),
        ({"stop_strings": "END"}, "stop_strings: expected several strings"),
        ({"system_prompt": "forbidden"}, "template refuses this chat: no such system"),
        ({"system_prompt": "x", "use_chat_template": False}, "without a chat template"),
        ({"temp": -1}, "temp"),
        ({"stop_tokens": ["END"]}, "stop_tokens: expected a whole number"),
        ({"system_prompt": 3}, "system_prompt: expected text"),
        *[
            (
                {"chat_template_config": {"suffix": "x", variable: False}},
                f"chat_template_config: '{variable}' is set by mlxspec itself; leave it out",
            )
            for variable in (
                "add_generation_prompt",
                "conversation",
                "messages",
                "self",
                "tokenize",
                "truncation",
            )
        ],
        (
            {"chat_template_config": {1: 2}},
            "chat_template_config: expected names of variables, got 1",
        ),
        ({"tile_widths": (1,)}, "tile_widths: set when the engine is made"),
    ],
)
def test_options_are_refused_when_the_conversation_is_made(
    options: dict, message: str, teller: Any, engine: Any, tokenizer: Any
) -> None:
    calls = engine.call_count
    with pytest.raises(ValueError, match=message):
        Conversation(teller, tokenizer, engine=engine, **options)
    assert engine.call_count == calls


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_conversation_makes_the_engine_that_is_named(
    kind: str, teller: Any, tokenizer: Any
) -> None:
    conversation = Conversation(teller, tokenizer, engine=kind, max_tokens=4)
    assert say(conversation, "two")[0] == "Once upon a time"
    say(conversation, "dogs")
    assert conversation.turns[-1].stats.reused_tokens > 0
    with pytest.raises(ValueError, match="expected 'static' or 'dynamic', got 'quick'"):
        Conversation(teller, tokenizer, engine="quick")


def test_a_message_that_is_no_text_costs_nothing(teller: Any, engine: Any, tokenizer: Any) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine)
    say(conversation, "two")
    before = list(engine.tokens), list(conversation.turns)
    for message in ("half of \ud83d", b"two", None):
        with pytest.raises(ValueError, match="message: expected text"):
            conversation.reply(message)
    assert (list(engine.tokens), list(conversation.turns)) == before


def test_a_message_that_the_template_refuses_costs_nothing(
    teller: Any, engine: Any, tokenizer: Any
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine)
    say(conversation, "two")
    before = list(engine.tokens), list(conversation.turns)
    tokenizer._tokenizer.chat_template = "{{ raise_exception('too rude') }}"
    with pytest.raises(ValueError, match="template refuses this chat: too rude"):
        conversation.reply("dogs")
    assert (list(engine.tokens), list(conversation.turns)) == before


# Words of the story are one token each, so lengths are easily chosen.
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=8)
CONTEXT = 96


@pytest.fixture(scope="module")
def narrow(teller: Any) -> StaticShapeEngine:
    return StaticShapeEngine(teller, max_context_length=CONTEXT)


@pytest.fixture(scope="module")
def readers(story: Any) -> Any:
    """The tokenizer as it is."""
    return mlxspec.load(str(story), lazy=True)[1]


@given(lengths=LENGTHS, max_tokens=st.sampled_from([-1, 1, 5, 24, 60]))
@settings(max_examples=25)
def test_a_trimmed_conversation_keeps_the_system_prompt_and_the_newest_turns_that_fit(
    lengths: list[int], max_tokens: int, teller: Any, narrow: StaticShapeEngine, readers: Any
) -> None:
    tokenizer = readers
    conversation = Conversation(
        teller,
        tokenizer,
        engine=narrow,
        system_prompt="Tell.",
        max_tokens=max_tokens,
        context_policy="trim",
    )
    said = [" ".join((WORDS.split() * 2)[i : i + n]) for i, n in enumerate(lengths)]
    room = CONTEXT // 4 if max_tokens < 0 else min(max_tokens, CONTEXT // 4)

    def rendered(first: int, message: str) -> str:
        messages = [m for turn in turns[first:] for m in _messages(turn)]
        head = [{"role": "system", "content": "Tell."}]
        messages = [*head, *messages, {"role": "user", "content": message}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def length(first: int, message: str) -> int:
        return len(tokenizer.encode(rendered(first, message), add_special_tokens=False))

    for message in said:
        turns = list(conversation.turns)
        before, count = conversation.dropped_turns, len(turns)
        needed = length(before, message)
        tokens = say(conversation, message)[1]
        first = conversation.dropped_turns
        assert len(narrow.tokens) + 1 <= CONTEXT
        prompt = list(narrow.tokens)[: len(narrow.tokens) + 1 - len(tokens)]
        assert tokenizer.decode(prompt) == rendered(first, message) or "�" in _said(conversation)
        if needed + room <= CONTEXT:
            assert first == before
        else:
            # As few turns as that are dropped, or all that there are.
            fitting = [f for f in range(before, count) if length(f, message) <= CONTEXT * 3 // 4]
            fitting = [f for f in fitting if f > before] or [count]
            assert first == fitting[0]
        if conversation.turns[-1].ending == "context":
            assert max_tokens < 0 or max_tokens > CONTEXT - needed
    assert [turn.message for turn in conversation.turns] == said
    assert len(conversation.messages) == 1 + 2 * len(said)


def _messages(turn: Any) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": turn.message},
        {"role": "assistant", "content": turn.answer},
    ]


def _said(conversation: Conversation) -> str:
    return "".join(turn.answer for turn in conversation.turns)


def test_a_full_context_is_explained_and_costs_nothing(
    teller: Any, narrow: StaticShapeEngine, tokenizer: Any, fed: list[list[int]]
) -> None:
    conversation = Conversation(teller, tokenizer, engine=narrow, max_tokens=30)
    say(conversation, "two")
    say(conversation, "dogs")
    before = list(narrow.tokens), list(conversation.turns)
    with pytest.raises(ContextFull, match=r"takes \d+ tokens with this message.* context of 96"):
        conversation.reply(WORDS + WORDS)
    assert (list(narrow.tokens), list(conversation.turns)) == before
    conversation.context_policy = "trim"
    say(conversation, WORDS + WORDS)
    assert conversation.dropped_turns == 2
    with pytest.raises(ContextFull, match=r"message takes .* with the system prompt.*shorten it"):
        conversation.reply(WORDS * 9)
    assert conversation.dropped_turns == 2
    assert len(conversation.turns) == 3


def test_a_file_is_written_whole_or_not_at_all(
    teller: Any, engine: Any, tokenizer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(teller, tokenizer, engine=engine)
    say(conversation, "two")
    path = tmp_path / "chat.md"
    path.write_text("what was there")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _full_disk)
        with pytest.raises(OSError, match="full"):
            save_conversation(conversation, path, model="story")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("chat.md", "what was there")]
    save_conversation(conversation, path, model="story")
    assert path.read_text() == f"# Chat with story\n\n## User\n\ntwo\n\n## Assistant\n\n{STORY}\n"
    with pytest.raises(ValueError, match=r"ends in .json, .md or .safetensors"):
        save_conversation(conversation, tmp_path / "chat.txt", model="story")


def test_a_saved_conversation_goes_on_as_if_it_had_never_stopped(
    teller: Any, tokenizer: Any, fed: list[list[int]], tmp_path: Any
) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits if "never" not in tokenizer.decode(tokens.tolist()) else 1 / 0

    path = tmp_path / "chat.safetensors"
    options = {"prompt_lookup": True, "logits_processors": [fail]}
    first = Conversation(teller, tokenizer, system_prompt="Tell.", **options)
    say(first, "two")
    say(first, "dogs")
    # The engine has read the message, and the answer has not begun.
    with pytest.raises(ZeroDivisionError):
        next(first.reply(f"never {WORDS}"))
    known = [*fed[1], *tokenizer.encode(STORY, add_special_tokens=False)]
    assert list(first.engine.tokens)[: len(known)] == known < list(first.engine.tokens)
    save_conversation(first, path, model="story")
    second = Conversation(teller, tokenizer, system_prompt="Another.", **options)
    resume_conversation(second, path)
    assert second.messages == first.messages
    assert list(second.engine.tokens) == known
    held = len(known)
    assert say(second, "one quick") == say(first, "one quick")
    assert fed[-1] == fed[-2]
    assert second.turns[-1].stats.reused_tokens == held
    assert [turn.ending for turn in second.turns] == ["stop"] * 3


def test_saving_in_the_midst_of_an_answer_is_refused_and_costs_nothing(
    teller: Any, tokenizer: Any, tmp_path: Any
) -> None:
    conversation = Conversation(teller, tokenizer)
    say(conversation, "two")
    responses = conversation.reply("dogs")
    text = next(responses).text + next(responses).text
    with pytest.raises(EngineBusy):
        save_conversation(conversation, tmp_path / "chat.safetensors", model="story")
    assert text + "".join(r.text for r in responses) == STORY
    assert not list(tmp_path.iterdir())


def test_a_forgotten_message_costs_a_saved_conversation_nothing(
    tokenizer: Any, tmp_path: Any, fed: list[list[int]]
) -> None:
    """Also where the layers cannot go back to before it: what they forgot is read again."""

    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits if tokens.size < 60 else 1 / 0

    model = varied_model("lfm2", vocab_size=len(tokenizer))
    options = {"max_tokens": 4, "logits_processors": [fail]}
    conversation = Conversation(model, tokenizer, **options)
    _, answer = say(conversation, "two")
    with pytest.raises(ZeroDivisionError):
        next(conversation.reply(f"{WORDS} {WORDS} {WORDS}"))
    save_conversation(conversation, tmp_path / "chat.safetensors", model="story")
    other = Conversation(model, tokenizer, **options)
    resume_conversation(other, tmp_path / "chat.safetensors")
    assert list(other.engine.tokens) == [*fed[0], *answer]


def test_a_file_without_a_conversation_changes_nothing(
    teller: Any, tokenizer: Any, tmp_path: Any
) -> None:
    conversation = Conversation(teller, tokenizer)
    path = tmp_path / "chat.safetensors"
    with pytest.raises(PromptCacheError, match="nothing was said yet"):
        save_conversation(conversation, path, model="story")
    assert not list(tmp_path.iterdir())
    say(conversation, "two")
    before = list(conversation.engine.tokens), list(conversation.turns)
    for metadata, message in (
        ({}, "holds no conversation"),
        ({"conversation": "{"}, "is damaged"),
        ({"conversation": '{"turns": [1]}'}, "is damaged"),
    ):
        save_prompt_cache(path, conversation.engine, metadata)
        with pytest.raises(PromptCacheError, match=message):
            resume_conversation(conversation, path)
    assert (list(conversation.engine.tokens), list(conversation.turns)) == before


def _full_disk(handle: int) -> None:
    raise OSError("the disk is full")
