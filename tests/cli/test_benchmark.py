"""`mlxspec benchmark`: a comparison from end to end, and refusals before a model loads."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

import mlxspec.models
from mlxspec.cli.main import main
from tests.cli.conftest import Outcome


@pytest.fixture(scope="module")
def measured(story_model, tmp_path_factory):
    """One run with every kind of result: (exit code, folder)."""
    folder = tmp_path_factory.mktemp("benchmark")
    prompts = folder / "own.jsonl"
    prompts.write_text('{"name": "mine", "prompt": "Once upon a time"}\n')
    options = {
        "--model": story_model,
        "--draft-model": story_model,
        "--prompts": prompts,
        "--max-tokens": 32,
        "--repeats": 2,
        "--tile-widths": "1,4",
        "--num-draft-tokens": 3,
        "--output": folder / "new.json",
        "--plot": folder / "new.png",
    }
    words = [str(word) for option in options.items() for word in option]
    code = main(["benchmark", *words])
    return code, folder


@pytest.fixture
def run(capsys, story_model):
    def run(*options):
        code = main(["benchmark", "--model", str(story_model), *map(str, options)])
        return Outcome(code, *capsys.readouterr())

    return run


def test_a_result_says_everything_that_was_measured(measured):
    code, folder = measured
    assert code == 0
    result = json.loads((folder / "new.json").read_text())
    assert result["command"].startswith("mlxspec benchmark --model story ")
    assert {"date", "commit", "machine", "versions", "seconds"} <= result.keys()
    (found,) = result["workloads"].values()
    assert list(found["contenders"]) == [
        "mlx-lm plain",
        "mlx-lm speculative",
        "mlxspec plain",
        "mlxspec lookup",
        "mlxspec draft model",
    ]
    for figures in found["contenders"].values():
        assert figures["tokens"] == 32
        assert figures["first_difference"] is None
        assert len(figures["seconds"]) == 2
        assert not figures["traced_on_the_clock"]
        assert figures["speed_up"]["least"] <= figures["speed_up"]["most"]
    lookup = found["contenders"]["mlxspec lookup"]
    assert lookup["drafts"]
    assert lookup["tokens_per_forward"] > 1
    assert found["contenders"]["mlxspec plain"]["drafts"] == []
    # It drafts for itself, so the model agrees with every token.
    drafted = found["contenders"]["mlxspec draft model"]["stats"]
    assert drafted["accepted"] == drafted["drafted"] > 0


def test_the_plot_is_a_picture(measured):
    picture = (measured[1] / "new.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_a_result_is_compared_with_an_older_one(measured, run, tmp_path):
    old = json.loads((measured[1] / "new.json").read_text())
    old["versions"]["mlx"] = "0.1"
    old["machine"]["processor"] = "Zilog Z80"
    (tmp_path / "old.json").write_text(json.dumps(old))
    outcome = run(
        *("--prompts", measured[1] / "own.jsonl", "--max-tokens", 32, "--repeats", 1),
        *("--tile-widths", "1,4", "--compare", tmp_path / "old.json"),
    )
    assert outcome.code == 0
    assert "other version of mlx: 0.1 then" in outcome.out
    assert "other processor: Zilog Z80 then" in outcome.out
    assert "then only: mine / mlx-lm speculative" in outcome.out
    assert "| mine " in outcome.out.split("Against the result")[1]


@pytest.fixture
def _no_model(monkeypatch):
    def reached(*args, **options):
        pytest.fail("a model was looked for before the options were checked")

    for name in ("resolve", "load"):
        monkeypatch.setattr(mlxspec.models, name, reached)


@pytest.mark.usefixtures("_no_model")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workloads", "copy,poem"], "names of copy, code_edit, json_copy, passage, prose"),
        (["--workloads", ""], "with commas between, or all"),
        (["--repeats", "0"], "--repeats: expected a whole number from 1 on"),
        (["--max-tokens", "1"], "expected a whole number from 2 on"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens: expected a whole number from 1 on"),
        (["--prompt-lookup-min-ngram", "9"], "--prompt-lookup-min-ngram: expected at most"),
        (["--prompts", "no-such-file"], "--prompts no-such-file: No such file"),
        (["--compare", "no-such-file"], "--compare no-such-file: No such file"),
        (["--output", "no-such-folder/x.json"], "a file in a folder that can be written to"),
        (["--output", "."], "a file in a folder that can be written to"),
        (["--plot", "x.jpg"], "expected a name that ends in .png"),
        (["--prompt-lookup"], "unknown option --prompt-lookup"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_looked_for(run, options, message):
    outcome = run(*options)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.usefixtures("_no_model")
def test_files_that_are_no_prompts_and_no_result_are_refused(run, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": 3}')
    assert "line 1: expected" in run("--prompts", file).err
    file.write_bytes(b"\xff\xfe")
    assert run("--prompts", file).code == 2
    assert run("--compare", file).code == 2
    file.write_text('{"name": "copy", "prompt": "a"}')
    assert "rename it" in run("--prompts", file, "--workloads", "copy").err


@pytest.mark.usefixtures("_no_model")
def test_a_plot_without_matplotlib_is_refused_with_the_way_to_get_it(run, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = run("--plot", tmp_path / "x.png")
    assert outcome.code == 2
    assert "pip install 'mlxspec[bench]'" in outcome.err


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_measured(run):
    outcome = run("--workloads", "prose", "--max-tokens", 4090)
    assert outcome.code == 2
    assert "prose: " in outcome.err
    assert "do not fit a context of 4096" in outcome.err


def test_a_draft_of_another_vocabulary_is_refused_by_name(run, bare_model, tmp_path):
    draft = shutil.copytree(bare_model, tmp_path / "drafty")
    tokens = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokens))
    outcome = run("--draft-model", draft, "--workloads", "prose")
    assert outcome.code == 2
    assert "'a'" in outcome.err
    assert outcome.err.count("\n") == 1
