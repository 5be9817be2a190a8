"""Prompt cache files: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxspec
from mlxspec import (
    Capture,
    DynamicShapeEngine,
    EngineBusy,
    PromptCacheError,
    SpeculativeDecoder,
    StaticShapeEngine,
    load_prompt_cache,
    save_prompt_cache,
)
from mlxspec.prompt_cache import read_prompt_cache_header
from tests.cases import prompt_of, varied_model
from tests.families.tiny import tiny_model
from tests.hostile import PlannedDrafter
from tests.rings.test_window_models import snapshot
from tests.turns.test_turns import CASES, Case, engine_of, turn

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


def filled(case, which="plain", *, prompt=30, answer=9):
    """An engine that holds a prompt and an answer; drafted where `which` says so."""
    engine = engine_of(case, which)
    engine.reset(0)
    text = prompt_of(prompt)
    tokens, _, _ = turn(engine, text, answer)
    if which == "drafted":
        engine.reset(0)
        plan = [("right then wrong", 6), ("right", 3), ("wrong", 7)]
        turn(engine, text, answer, PlannedDrafter(text + tokens, plan, engine.vocab_size))
    return engine, text + tokens


# What another process does with a file: it goes on, and tells ids, rows and what it reused.
_OTHER_PROCESS = """
import json, sys
import mlx.core as mx
import numpy as np
mx.disable_compile()
from mlxspec import load_prompt_cache
from tests.turns.test_turns import CASES, engine_of, turn
for number, file, prompt, out in json.load(sys.stdin):
    engine = engine_of(CASES[number], "read")
    load_prompt_cache(file, engine)
    tokens, rows, stats = turn(engine, prompt, 8)
    np.savez(out, tokens=tokens, rows=rows, reused=stats.reused_tokens)
"""


def test_another_process_goes_on_as_this_one_does(tmp_path):
    """Ids and log-probabilities of every family, past windows and the start of quantisation."""
    jobs, expected = [], []
    for number, case in enumerate(CASES):
        engine, text = filled(case, "drafted")
        file = tmp_path / f"{number}.safetensors"
        save_prompt_cache(file, engine)
        prompt = [*text, 3, 4, 5]
        jobs.append((number, str(file), prompt, str(tmp_path / f"{number}.npz")))
        expected.append(turn(engine, prompt, 8))
    subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS],
        input=json.dumps(jobs),
        text=True,
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    for (_, _, prompt, out), (tokens, rows, stats) in zip(jobs, expected, strict=True):
        theirs = np.load(out)
        assert theirs["tokens"].tolist() == tokens
        assert np.array_equal(theirs["rows"], rows)
        assert theirs["reused"] == stats.reused_tokens == len(prompt) - 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_tells_nothing_of_what_was_drafted(case, tmp_path):
    for which in ("plain", "drafted"):
        save_prompt_cache(tmp_path / which, filled(case, which)[0])
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "drafted").read_bytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saving_changes_nothing_and_what_is_read_goes_back_as_far(case, tmp_path):
    engine, _ = filled(case, "drafted")
    before = [engine.longest_rewind(to) for to in range(engine.processed_token_count + 1)]
    save_prompt_cache(tmp_path / "file", engine, {"of": "mine"})
    other = engine_of(case, "read")
    assert load_prompt_cache(tmp_path / "file", other) == {"of": "mine"}
    for e in (engine, other):
        assert [e.longest_rewind(to) for to in range(e.processed_token_count + 1)] == before
    assert list(other.tokens) == list(engine.tokens)
    # Writing what was read gives the same file, also after a turn that goes back.
    save_prompt_cache(tmp_path / "again", other, {"of": "mine"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "again").read_bytes()
    prompt = [*engine.tokens[:-4], 3]
    for e in (engine, other):
        turn(e, prompt, 1)
        save_prompt_cache(tmp_path / str(e is other), e)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whatever_rewind_the_reader_allows_is_right(case, tmp_path):
    """What is not in the file counts as overwritten, and is not taken for zeros."""
    engine, _ = filled(case)
    save_prompt_cache(tmp_path / "file", engine)
    other, count = engine_of(case, "read"), engine.processed_token_count
    load_prompt_cache(tmp_path / "file", other)
    allowed = [to for to in range(1, count + 1) if other.allows_rewind(to)]
    assert count in allowed
    for to in reversed(allowed):
        engine.reset(to)
        other.reset(to)
        theirs, ours = (e.verify([5], Capture(logits=True)).logits for e in (engine, other))
        assert mx.array_equal(ours, theirs), to
        for e in (engine, other):
            e.reset(to)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family in ("llama", "gemma3_text", "lfm2")], ids=str
)
def test_the_engine_that_reads_may_have_another_ladder_and_context(case, tmp_path):
    engine, text = filled(case)
    save_prompt_cache(tmp_path / "file", engine)
    tokens, _, _ = turn(engine, [*text, 3], 12)
    quantisation = {}
    if case.kv_start is not None:
        quantisation = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": case.kv_start}
    for widths, context, span in (((1, 4), 60, 32), ((1, 2, 4, 8, 16), 500, 256), ((1,), 90, 16)):
        other = StaticShapeEngine(
            varied_model(case.family, **case.changes),
            tile_widths=widths,
            max_context_length=context,
            span_step=span,
            **quantisation,
        )
        load_prompt_cache(tmp_path / "file", other)
        theirs, _, stats = turn(other, [*text, 3], 12)
        assert theirs == tokens
        assert stats.reused_tokens == len(text) - 1


def refused(file, engine, reason, **options):
    """The file is refused for this reason, and the engine is as it was and goes on."""
    before = snapshot(engine)
    with pytest.raises(PromptCacheError, match=reason):
        load_prompt_cache(file, engine, **options)
    assert snapshot(engine) == before


@cache
def small_engine(seed=0):
    engine = StaticShapeEngine(
        tiny_model("llama", seed=seed), max_context_length=60, tile_widths=(1, 4)
    )
    engine.prefill(prompt_of(12, seed=5))
    return engine


@pytest.fixture
def saved(tmp_path):
    save_prompt_cache(tmp_path / "saved.safetensors", small_engine())
    return tmp_path / "saved.safetensors"


def test_another_model_is_refused_with_the_difference(saved):
    refused(saved, small_engine(seed=1), "made with a model with other weights")
    config = {"rope_theta": 5000.0}
    other = StaticShapeEngine(varied_model("llama", **config), max_context_length=60)
    refused(saved, other, "made with a model with another config")
    other = StaticShapeEngine(tiny_model("qwen2"), max_context_length=60)
    refused(saved, other, "of the family llama, and this is one of qwen2")
    half = StaticShapeEngine(tiny_model("llama", dtype=mx.bfloat16), max_context_length=60)
    refused(saved, half, "weights have other shapes, or are quantised otherwise")


def test_one_changed_weight_makes_another_model(saved):
    model = tiny_model("llama")
    weight = model.model.layers[1].mlp.up_proj.weight
    weight[7, 13] = weight[7, 13] * 2
    refused(saved, StaticShapeEngine(model, max_context_length=60), "with other weights")


def test_another_quantisation_is_refused_with_both(tmp_path):
    cases = [c for c in CASES if c.family == "llama"]
    for case in cases:
        save_prompt_cache(tmp_path / "file", filled(case)[0])
        for other in cases:
            if other is not case:
                refused(tmp_path / "file", engine_of(other, "plain"), r"made with")
    save_prompt_cache(tmp_path / "file", filled(cases[1])[0])
    refused(
        tmp_path / "file",
        engine_of(cases[2], "plain"),
        "quantized_kv_start=1, and this engine runs with .*quantized_kv_start=24",
    )


def rewritten(file, **changes):
    """The file with other metadata."""
    arrays, metadata = mx.load(str(file), return_metadata=True, format="safetensors")
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, metadata | changes)


def test_a_later_version_is_refused(saved):
    rewritten(saved, version="2")
    refused(saved, small_engine(), "of version 2, and this mlxspec .* reads version 1")


def test_a_file_cut_off_anywhere_is_refused(saved):
    whole = saved.read_bytes()
    for length in (0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        refused(saved, small_engine(), "is no prompt cache, or only a part of one")


def test_a_file_damaged_anywhere_is_refused(saved):
    whole = saved.read_bytes()
    for at in range(0, len(whole), len(whole) // 60):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        saved.write_bytes(damaged)
        refused(saved, small_engine(), "prompt cache|damaged|made with|other safetensors")
    saved.write_bytes(whole)
    load_prompt_cache(saved, small_engine())


def test_foreign_files_are_refused(tmp_path, saved):
    file = tmp_path / "foreign.safetensors"
    mx.save_safetensors(str(file), {"weight": mx.zeros((2, 2))})
    refused(file, small_engine(), "expected a file of .* got other safetensors")
    file.write_text("once upon a time")
    refused(file, small_engine(), "is no prompt cache")
    _, metadata = mx.load(str(saved), return_metadata=True, format="safetensors")
    content = json.loads(metadata["content"])
    others = [
        json.dumps(content | {name: value})
        for name, value in (("token_count", "9"), ("quantization", [8]), ("metadata", {"model": 3}))
    ]
    for text in ("[]", "{}", "{", '{"model": {}}', *others):
        rewritten(saved, content=text)
        refused(saved, small_engine(), "its header does not say what it should")


def test_a_file_of_the_right_checksum_and_the_wrong_arrays_is_refused(saved, monkeypatch):
    """What no writer of ours makes: the engine is as it was all the same."""
    arrays, metadata = mx.load(str(saved), return_metadata=True, format="safetensors")
    mx.eval(arrays)
    monkeypatch.setattr("mlxspec.prompt_cache._checksum", lambda *_: metadata["checksum"])

    def without(name):
        return {key: array for key, array in arrays.items() if key != name}

    for changed, reason in (
        (without("slots.3"), "does not hold what its header says: KeyError 'slots.3'"),
        (without("tokens"), "does not hold what its header says: KeyError 'tokens'"),
        (arrays | {"slots.1": arrays["slots.1"][:, :, 1:]}, "its array 1 of keys and values is"),
        (arrays | {"slots.1": arrays["slots.1"].astype(mx.float16)}, "is mlx.core.float16"),
        (arrays | {"tokens": arrays["tokens"] + 990}, "outside the model's vocabulary"),
        (arrays | {"tokens": arrays["tokens"][None]}, "cannot be gone on from|does not hold"),
    ):
        mx.save_safetensors(str(saved), changed, metadata)
        refused(saved, small_engine(), reason)


def test_an_engine_of_older_weights_neither_saves_nor_loads(saved):
    model = tiny_model("llama")
    engine = StaticShapeEngine(model, max_context_length=60, tile_widths=(1, 4))
    engine.prefill([1, 2, 3])
    model.update(tiny_model("llama", seed=1).parameters())
    for call in (save_prompt_cache, load_prompt_cache):
        with pytest.raises(PromptCacheError, match="weights have changed since the engine was"):
            call(saved, engine)


def test_the_prompt_of_a_file_of_ours_is_compared_if_it_is_given(saved):
    tokens = list(small_engine().tokens)
    load_prompt_cache(saved, small_engine(), prompt=mx.array(tokens))
    refused(saved, small_engine(), "covers other tokens than the prompt", prompt=tokens[:-1])


def test_metadata_are_texts(saved):
    before = saved.read_bytes()
    for metadata in ({"of": 3}, {3: "of"}, {"of": None}):
        with pytest.raises(ValueError, match="metadata: expected texts by names"):
            save_prompt_cache(saved, small_engine(), metadata)
    assert saved.read_bytes() == before


def test_who_may_read_the_old_file_may_read_the_new_one_and_nobody_else(saved, monkeypatch):
    while_written = []
    write = mx.save_safetensors

    def watched(file, *arguments):
        write(file, *arguments)
        while_written.append(Path(file.name).stat().st_mode & 0o777)

    monkeypatch.setattr(mx, "save_safetensors", watched)
    for mode in (0o600, 0o664):
        saved.chmod(mode)
        save_prompt_cache(saved, small_engine())
        assert saved.stat().st_mode & 0o777 == mode == while_written.pop()


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()

    def seen(name):
        # Not when it was read last, which the attempt may change.
        found = (tmp_path / name).lstat()
        return found.st_mode, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns

    for name in ("pipe", "loop", "folder"):
        before = seen(name)
        with pytest.raises(OSError, match=name):
            save_prompt_cache(tmp_path / name, small_engine())
        assert seen(name) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "loop", "pipe"]


def test_a_file_may_have_any_name_that_files_may_have(tmp_path):
    for name in ("n" * 255, "\u65e5" * 85, "a b\n"):
        save_prompt_cache(tmp_path / name, small_engine())
        load_prompt_cache(tmp_path / name, small_engine())


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "none", small_engine())
    with pytest.raises(IsADirectoryError):
        load_prompt_cache(tmp_path, small_engine())


def test_a_text_longer_than_the_context_is_refused(saved):
    short = StaticShapeEngine(tiny_model("llama"), max_context_length=12, tile_widths=(1, 4))
    refused(saved, short, "12 tokens, too many for a context of 12")


def test_tiles_that_cannot_go_on_from_a_recurrent_state_refuse_it(tmp_path):
    engine, _ = filled(Case("lfm2"))
    save_prompt_cache(tmp_path / "file", engine)
    aligned = engine_of(Case("lfm2", placement="aligned"), "read")
    aligned.reset(0)
    refused(tmp_path / "file", aligned, r"covers 38 of its 38 tokens, from where no tile")


def test_tiles_that_would_see_keys_that_the_file_lacks_refuse_it(tmp_path):
    windowed = {"sliding_window": 16}
    model = varied_model("gemma3_text", **windowed)
    narrow = StaticShapeEngine(model, max_context_length=90, tile_widths=(1, 2))
    narrow.prefill(prompt_of(39))
    save_prompt_cache(tmp_path / "file", narrow)
    # It would start at position 32, and the file's keys begin with what position 37 sees.
    aligned = engine_of(Case("gemma3_text", windowed, placement="aligned"), "read")
    aligned.reset(0)
    refused(tmp_path / "file", aligned, r"sliding windows lack keys that a tile of .*\(8,\)")


def test_only_static_engines_that_hold_something_are_saved(tmp_path):
    engine = StaticShapeEngine(tiny_model("llama"), max_context_length=60)
    with pytest.raises(PromptCacheError, match="holds no tokens"):
        save_prompt_cache(tmp_path / "file", engine)
    dynamic = DynamicShapeEngine(tiny_model("llama"), max_context_length=60)
    for call in (save_prompt_cache, load_prompt_cache):
        with pytest.raises(PromptCacheError, match="StaticShapeEngine, got a DynamicShapeEngine"):
            call(tmp_path / "file", dynamic)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_generating_is_left_alone(saved):
    engine = small_engine()
    emissions = SpeculativeDecoder(engine).generate([1, 2, 3])
    next(emissions)
    for call in (save_prompt_cache, load_prompt_cache):
        with pytest.raises(EngineBusy):
            call(saved, engine)
    emissions.close()


def test_a_file_that_cannot_be_written_leaves_the_old_one(saved, monkeypatch):
    before = saved.read_bytes()

    def full(file, *arguments):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_prompt_cache(saved, small_engine())
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


# Writes a new file over an old one, and stops half way until somebody kills it.
_KILLED = """
import sys, time
import mlx.core as mx
mx.disable_compile()
from mlxspec import StaticShapeEngine, save_prompt_cache
from tests.cases import prompt_of
from tests.families.tiny import tiny_model
engine = StaticShapeEngine(tiny_model("llama"), max_context_length=60, tile_widths=(1, 4))
engine.prefill(prompt_of(40))
write = mx.save_safetensors
def half(file, arrays, metadata):
    write(file, dict(list(arrays.items())[:3]), metadata)
    file.flush()
    print("half", flush=True)
    time.sleep(60)
if sys.argv[2] == "half":
    mx.save_safetensors = half
print("ready", flush=True)
while True:
    save_prompt_cache(sys.argv[1], engine)
"""


@pytest.mark.parametrize("moment", ["half", "any"])
def test_killing_the_process_while_it_writes_leaves_the_old_file_or_the_new(saved, moment):
    old = small_engine().tokens[:]
    for delay in (0.0,) if moment == "half" else (0.001, 0.01, 0.03, 0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(saved), moment],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )
        for _ in range(2 if moment == "half" else 1):
            process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        engine = small_engine()
        load_prompt_cache(saved, engine)
        if moment == "half":
            assert list(engine.tokens) == old
            assert len(list(saved.parent.glob(".*.part"))) == 1
        else:
            assert list(engine.tokens) in (old, prompt_of(40))
        load_prompt_cache(saved, engine)


def test_the_header_is_read_without_model_and_arrays(saved):
    header = read_prompt_cache_header(saved)
    assert header.model.family == "llama"
    assert header.quantization is None
    assert header.token_count == len(small_engine().tokens)


def test_the_public_names_are_there():
    assert mlxspec.save_prompt_cache is save_prompt_cache
    assert mlxspec.load_prompt_cache is load_prompt_cache
