"""Results can be read, summed up and compared, and what is no result is refused."""

from __future__ import annotations

import copy
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.benchmark import Spread, provenance, read_prompts
from mlxspec.benchmark.history import differences, differences_page, read_result
from mlxspec.cli.benchmark import _WORKLOADS

NUMBERS = st.lists(st.floats(0.1, 1000), min_size=1, max_size=9)


def figures(*rates):
    spread = Spread.of(rates).as_dict()
    return {"tokens_per_second": spread, "speed_up": spread}


def result(**workloads):
    return {
        "date": "2026-01-01",
        "commit": "abc",
        "model": "m",
        "machine": {"processor": "P", "load_average": 0.5},
        "versions": {"mlx": "1"},
        "workloads": {
            name: {"prompt_tokens": 5, "prompt_digest": "d", "contenders": {"x": found}}
            for name, found in workloads.items()
        },
    }


@given(NUMBERS)
def test_a_spread_is_in_order_and_knows_the_median(sample):
    found = Spread.of(sample)
    ordered = (found.least, found.lower_quartile, found.median, found.upper_quartile, found.most)
    assert list(ordered) == sorted(ordered) or max(ordered) - min(ordered) < 1e-9
    assert found.median == pytest.approx(statistics.median(sample))
    assert (found.least, found.most) == (min(sample), max(sample))


def test_an_empty_sample_has_no_spread():
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


@given(NUMBERS, NUMBERS)
def test_two_results_are_within_spread_if_their_ranges_meet(old, new):
    (row,) = differences(result(a=figures(*old)), result(a=figures(*new)))["rows"]
    measure = row["tokens_per_second"]
    assert measure["ratio"] == statistics.median(new) / statistics.median(old)
    apart = max(old) < min(new) or max(new) < min(old)
    assert measure["within_spread"] is not apart


def test_other_circumstances_are_said():
    old, new = result(a=figures(1.0)), result(a=figures(2.0))
    new["machine"] = {"processor": "Q", "load_average": 9.0}
    new["versions"] = {"mlx": "2"}
    new["workloads"]["a"]["prompt_digest"] = "other"
    found = differences(old, new)
    assert found["circumstances"] == {"processor": ["P", "Q"], "version of mlx": ["1", "2"]}
    assert found["other_prompts"] == ["a"]
    page = differences_page(found)
    for said in ("P then, Q now", "1 then, 2 now", "other prompt: a", "+100.0%", "abc"):
        assert said in page


def test_results_of_one_machine_have_no_other_circumstances():
    old = result(a=figures(1.0, 2.0))
    new = copy.deepcopy(old)
    new["machine"]["load_average"] = 3.0
    found = differences(old, new)
    assert found["circumstances"] == {}
    assert found["other_prompts"] == []
    assert "within spread" in differences_page(found)


def test_what_only_one_result_has_is_named():
    old, new = result(a=figures(1.0), b=figures(1.0)), result(a=figures(1.0), c=figures(1.0))
    old["workloads"]["a"]["contenders"]["y"] = figures(1.0)
    found = differences(old, new)
    assert (found["only_old"], found["only_new"]) == (["a / y", "b"], ["c"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"workloads": {}}', json.dumps(result(a={"speed_up": 1}))],
)
def test_what_is_no_result_is_refused(tmp_path, text):
    file = tmp_path / "old.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="expected a result"):
        read_result(file)


def test_results_from_before_quartiles_are_read(tmp_path):
    old = result(a={m: {"median": 2.0, "least": 1.0, "most": 3.0} for m in figures(1.0)})
    file = tmp_path / "old.json"
    file.write_text(json.dumps(old))
    (row,) = differences(read_result(file), result(a=figures(4.0)))["rows"]
    assert row["speed_up"]["ratio"] == 2
    assert row["speed_up"]["within_spread"] is False


def test_provenance_names_machine_versions_and_commit_and_no_folder():
    found = provenance(["mlxspec", "benchmark", "--model", "/home/somebody/models/x"])
    assert found["command"] == "mlxspec benchmark --model x"
    assert set(found["versions"]) == {"mlx", "mlx-lm", "mlxspec", "numpy", "python"}
    assert found["machine"]["processor"]
    assert found["commit"] not in ("", "unknown")
    assert json.loads(json.dumps(found)) == found


def test_text_prompts_stand_between_rules(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\nstill one\n---\n=== user\ntwo?\n=== assistant\nTwo\n---\n\n")
    first, second = read_prompts(file)
    assert first.messages == ({"role": "user", "content": "one\n\nstill one"},)
    assert [turn["content"] for turn in second.messages] == ["two?", "Two"]
    assert [first.name, second.name] == ["prompt 1", "prompt 2"]


def test_json_lines_hold_prompts_or_conversations(tmp_path):
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    lines = [{"prompt": "hello"}, {"name": "chat", "messages": turns}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_prompts(file)
    assert first.messages == ({"role": "user", "content": "hello"},)
    assert second.messages == tuple(turns)
    assert [first.name, second.name] == ["prompt 1", "chat"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one prompt"),
        ("{", "line 1: expected a JSON object"),
        ('{"prompt": "a"}\n[1]', "line 2: expected a JSON object"),
        ('{"prompt": ""}', 'line 1: expected "prompt"'),
        ('{"prompt": "a", "name": 3}', '"name" to be a text'),
        ('{"messages": [{"role": "judge", "content": "a"}]}', 'expected "prompt"'),
        ('{"messages": [{"role": "system", "content": "a"}]}', "the last not the system's"),
        ('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}', "'x' twice"),
    ],
)
def test_a_mistake_in_a_prompts_file_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def test_the_command_knows_every_fixed_text():
    from mlxspec.benchmark import NAMES

    assert _WORKLOADS == NAMES
