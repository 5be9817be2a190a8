"""`--json-schema` and `--regex`: the text obeys, drafts change none of it, bad ones end early."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

import mlxspec.models
from tests.cli.conftest import Run

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog", "Once upon a time"]},
        "legs": {"type": "integer", "minimum": 1, "maximum": 99},
        "quick": {"type": "boolean"},
    },
    "required": ["animal", "legs", "quick"],
    "additionalProperties": False,
}
PLAIN = ["--num-draft-tokens", 0]


@pytest.fixture
def schema_file(tmp_path: Path) -> Path:
    path = tmp_path / "animal.json"
    path.write_text(json.dumps(SCHEMA))
    return path


@pytest.mark.parametrize("sampling", [[], ["--temp", 1, "--seed", 3]])
@pytest.mark.parametrize(
    "more", [[], ["--repetition-penalty", 1.5], ["--engine", "dynamic"]], ids=str
)
def test_the_text_is_json_of_the_schema_with_and_without_drafts(
    generate: Run, schema_file: Path, sampling: list, more: list
):
    asked = ["--json-schema", schema_file, "-m", 300, *sampling]
    plain = generate(*asked, *more, *PLAIN)
    drafts = [] if "--engine" in more else ["--prompt-lookup"]
    drafted = generate(*asked, *more, *drafts)
    assert plain.code == drafted.code == 0
    jsonschema.validate(json.loads(plain.text), SCHEMA)
    assert drafted.text == plain.text


def test_a_schema_may_stand_on_the_command_line(generate: Run, schema_file: Path):
    from_file = generate("--json-schema", schema_file, "-m", 300)
    inline = generate("--json-schema", schema_file.read_text(), "-m", 300)
    assert inline.code == 0
    assert inline.text == from_file.text


def test_forced_tokens_are_drafted_without_a_drafter_and_counted(generate: Run, schema_file: Path):
    plain = generate("--json-schema", schema_file, *PLAIN)
    drafted = generate("--json-schema", schema_file)
    counted = re.search(r"(\d+) forced by the grammar", plain.out)
    assert counted
    assert int(counted[1]) > 5
    assert counted[0] in drafted.out
    figures = re.search(r"(\d+) rounds, (\d+) forwards, (\d+) drafted, \3 accepted", drafted.out)
    assert figures
    assert int(figures[3]) > 5


def test_forced_text_is_coloured(generate: Run, schema_file: Path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = generate("--json-schema", schema_file, "--show-drafts")
    assert "\x1b[32m" in outcome.text
    assert "Drafted text is \x1b[32mgreen" in outcome.out


def test_the_whole_text_matches_the_pattern(generate: Run):
    pattern = r"(Once|there) [a-z]{2,5} (fox|dog)s?\."
    outcome = generate("--regex", pattern)
    assert re.fullmatch(pattern, outcome.text)


def test_a_schema_may_ask_for_another_layout(generate: Run, tmp_path: Path):
    path = tmp_path / "schema.json"
    layout = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
    path.write_text("\ufeff" + json.dumps(SCHEMA | {"x-guidance": layout}), encoding="utf-8")
    text = generate("--json-schema", path).text
    assert json.dumps(json.loads(text), separators=(",", ":")) == text


def test_a_text_that_a_limit_ends_is_said_to_be_perhaps_incomplete(
    generate: Run, schema_file: Path
):
    whole = generate("--json-schema", schema_file)
    assert whole.err == ""
    cut = generate("--json-schema", schema_file, "-m", 4)
    assert whole.text.startswith(cut.text)
    assert cut.err.startswith("mlxspec generate: warning: --max-tokens or the context ended")
    assert generate("-m", 4).err == ""


def test_what_a_schema_itself_lets_go_is_warned_of(generate: Run, tmp_path: Path):
    path = tmp_path / "schema.json"
    path.write_text('{"enum": [1, 2], "uniqueItems": true, "x-guidance": {"lenient": true}}')
    outcome = generate("--json-schema", path)
    assert outcome.code == 0
    assert f"warning: --json-schema {path}: Unimplemented keys" in outcome.err


def test_drafting_options_have_no_effect_on_the_dynamic_engine(generate: Run, schema_file: Path):
    outcome = generate("--json-schema", schema_file, "--engine", "dynamic", "--num-draft-tokens", 3)
    assert "--num-draft-tokens (the dynamic engine drafts nothing)" in outcome.err


@pytest.fixture
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that so much as looks for a model."""

    def reached(*args: object, **options: object) -> None:
        pytest.fail("a model was looked for before the grammar was judged")

    for name in ("resolve", "load"):
        monkeypatch.setattr(mlxspec.models, name, reached)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "expected JSON, got {"),
        ("7", "expected an object, true or false, got 7"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{"enum": []}', "Unsatisfiable schema"),
        ('{"uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ('{"pattern": "("}', "unclosed group"),
        ('{"items": [{"pattern": "a\\\\"}]}', "ends in a backslash"),
        ('{"patternProperties": {"(?x) a": {}}}', "pattern '(?x) a': verbose mode"),
    ],
)
@pytest.mark.usefixtures("_no_model")
def test_a_bad_schema_is_refused_before_a_model_is_looked_for(
    generate: Run, tmp_path: Path, text: str, reason: str
):
    path = tmp_path / "schema.json"
    path.write_text(text)
    outcome = generate("--json-schema", path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"mlxspec generate: error: --json-schema {path}: ")
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1
    if text.startswith("{"):
        inline = generate("--json-schema", text)
        assert inline.code == 2
        assert inline.err == outcome.err.replace(str(path), "{...}")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(yes|no", "--regex: unclosed group, at '(yes|no'\n"),
        ("é[a-", "--regex: unclosed character class, at '[a-'\n"),
        ("(?i", "--regex: expected flag but got end of regex, at its end\n"),
        ("(?P<a>x)(?P<a>y)", "--regex: duplicate capture group name, at 'a>x)(?P<a>y)'\n"),
        ("a\\\\\\", "--regex: it ends in a backslash that escapes nothing\n"),
        ("(?i)a(?sx:b # c\n)", "--regex: verbose mode, (?x), is not supported"),
        (r"[^\s\S]", "--regex: no text satisfies it"),
        (r"(a)\1", r"--regex: backreferences are not supported, at '\\1'"),
    ],
)
@pytest.mark.usefixtures("_no_model")
def test_a_bad_pattern_is_refused_before_a_model_is_looked_for(
    generate: Run, pattern: str, reason: str
):
    outcome = generate("--regex", pattern)
    assert outcome.code == 2
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.usefixtures("_no_model")
def test_a_schema_file_that_cannot_be_read_is_refused(generate: Run, tmp_path: Path):
    missing = tmp_path / "missing.json"
    outcome = generate("--json-schema", missing)
    assert (outcome.code, "expected a file that can be read" in outcome.err) == (2, True)
    assert str(missing) in outcome.err
    (tmp_path / "latin.json").write_bytes(b'{"const": "\xe9"}')
    outcome = generate("--json-schema", tmp_path / "latin.json")
    assert (outcome.code, "expected a file of text in UTF-8" in outcome.err) == (2, True)
    outcome = generate("--json-schema", tmp_path)
    assert (outcome.code, "expected a file that can be read" in outcome.err) == (2, True)


@pytest.mark.usefixtures("_no_model")
def test_what_does_not_go_together_is_refused_by_name(generate: Run, schema_file: Path):
    outcome = generate("--json-schema", schema_file, "--regex", "a")
    assert "--json-schema and --regex: give one of them, not both" in outcome.err
    rejection = ["--prompt-lookup", "--acceptance", "rejection", "--temp", 1]
    outcome = generate("--regex", "a", *rejection)
    assert "--regex: --acceptance rejection needs" in outcome.err
    outcome = generate("--json-schema", schema_file, *rejection)
    assert "--json-schema: --acceptance rejection needs" in outcome.err
    outcome = generate("--show-drafts")
    assert "--show-drafts needs --prompt-lookup or --draft-model or --json-schema" in outcome.err
