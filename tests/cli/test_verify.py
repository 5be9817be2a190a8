"""`mlxspec verify`: a verdict a person and a script can read, and a code that tells a fault."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import mlxspec.scan
import mlxspec.verification
from mlxspec.cli.main import main


def test_a_model_is_verified_and_the_verdict_printed(story_model, capsys):
    assert main(["verify", "--model", str(story_model), "-m", "12", "-p", "Once upon a time"]) == 0
    out = capsys.readouterr().out
    assert "drafted by prompt lookup" in out
    assert "Speculation changes nothing here." in out


def test_the_verdict_comes_as_json(story_model, capsys):
    assert main(["verify", "--model", str(story_model), "-m", "6", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["passed"] is True
    assert verdict["tokens"] <= 6


def test_a_broken_promise_is_exit_code_1(story_model, capsys, monkeypatch):
    verify_model = mlxspec.verification.verify_model

    def broken(*arguments, **options):
        verdict = verify_model(*arguments, **options)
        return replace(verdict, checks=[replace(verdict.checks[0], equal=False), *verdict.checks])

    monkeypatch.setattr(mlxspec.verification, "verify_model", broken)
    assert main(["verify", "--model", str(story_model), "-m", "4"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("failures", [(), ("f32 [1, 5]: argmax 3 instead of 2",)])
def test_kernels_are_verified_without_a_model(capsys, monkeypatch, failures):
    from mlxspec.scan.check import KernelVerdict

    verdict = KernelVerdict("metal", "Apple M4", "0.32.4", 9, failures)
    monkeypatch.setattr(mlxspec.scan, "check_kernels", lambda report: verdict)
    assert main(["verify", "--kernels"]) == bool(failures)
    assert "Apple M4" in capsys.readouterr().out
    assert main(["verify", "--kernels", "--json"]) == bool(failures)
    assert json.loads(capsys.readouterr().out)["failures"] == list(failures)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["-m", "0"], "--max-tokens"), (["--modle", "x"], "--modle"), (["--model", "x/"], "x/")],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, options, message):
    assert main(["verify", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mlxspec verify: error:")
    assert message in err
    assert err.count("\n") == 1
