"""`mlxspec verify`: a verdict a person and a script can read, and a code that tells a fault."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest

import mlxspec.scan
import mlxspec.verification
import mlxspec.verification.run
from mlxspec.cli.main import main


@pytest.fixture(scope="module")
def small(story_model):
    """Options for a look that takes a second."""
    return ["--model", str(story_model), "--tile-widths", "1,4", "--up-to", "1"]


def test_a_model_is_verified_and_the_verdict_printed(small, capsys):
    assert main(["verify", *small, "-m", "12", "-p", "Once upon a time"]) == 0
    out = capsys.readouterr().out
    for said in (
        "drafted by prompt lookup",
        "bit for bit",
        "Price of exactness: none",
        "Decoded in: 1, 4",
        "Not looked at: span of 256",
        "Speculation changes nothing here.",
    ):
        assert said in out
    assert ("Kernels:" in out) is mx.metal.is_available()


def test_the_verdict_comes_as_json(small, capsys):
    assert main(["verify", *small, "-m", "6", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["passed"] is True
    assert verdict["tokens"] <= 6
    assert verdict["places"] == ["prompt"]
    assert {check["status"] for check in verdict["checks"]} == {"equal"}
    assert set(verdict["price"]) >= {"exact_ms", "free_ms", "mlx_lm_ms", "exactness"}
    assert set(verdict["versions"]) == {"mlxspec", "mlx", "mlx-lm"}


@pytest.mark.parametrize(
    ("status", "in_use", "code"),
    [("fault", True, 1), ("fault", False, 0), ("near tie", False, 0), ("near tie", True, 0)],
)
def test_exit_code_1_is_for_a_fault_in_what_is_in_use(
    small, capsys, monkeypatch, status, in_use, code
):
    verify_model = mlxspec.verification.verify_model

    def broken(*arguments, **options):
        verdict = verify_model(*arguments, **options)
        wrong = replace(verdict.checks[0], status=status, in_use=in_use)
        return replace(verdict, checks=[wrong, *verdict.checks[1:]])

    monkeypatch.setattr(mlxspec.verification, "verify_model", broken)
    assert main(["verify", *small, "-m", "4"]) == code
    out = capsys.readouterr().out
    assert ("FAULT" in out) is bool(code)
    line = next(line for line in out.splitlines() if "scored in tiles of 4" in line)
    assert (status.upper() if code else status) in line
    assert line.endswith("[not in use]") is (not in_use)


def test_the_probe_says_what_it_measured(small, capsys):
    assert main(["verify", *small[:4], "--probe"]) == 0
    out = capsys.readouterr().out
    for said in ("ms a tile", "Decoded in: 1, 4", "The tile costs were"):
        assert said in out
    assert main(["verify", *small[:4], "--probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["remembered"]["tile costs"] is True
    assert set(found["milliseconds"]) == {"1", "4"}


def test_options_that_a_look_does_not_use_are_named(small, capsys):
    assert main(["verify", *small, "-m", "4", "--probe"]) == 0
    assert capsys.readouterr().err == (
        "mlxspec verify: warning: without effect: --max-tokens, --up-to "
        "(--probe generates nothing)\n"
        "measuring what is not remembered, which may take minutes ...\n"
    )
    assert main(["verify", "--probe", "--kernels"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_wrong_kernels_are_a_fault_too(small, capsys, monkeypatch):
    monkeypatch.setattr(mlxspec.verification.run, "_kernels", lambda: ("metal: 1 wrong", False))
    assert main(["verify", *small, "-m", "4"]) == 1
    assert "Kernels: metal: 1 wrong" in capsys.readouterr().out


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
