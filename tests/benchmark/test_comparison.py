"""Contenders take turns, another one first each time, and are compared within one repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlxspec.benchmark import BASELINE, Run, compare, table

TOKENIZER: Any = SimpleNamespace(eos_token_ids=[2], decode=lambda tokens: str(tokens))


@dataclass
class Scripted:
    """A contender that takes as long as it is told, and writes down what it was asked."""

    name: str
    seconds: list[float]
    log: list[tuple[str, str]]
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    traced: bool = False
    model: Any = None

    def warm_up(self, prompt, limit):
        self.log.append(("warm up", self.name))

    def run(self, prompt, limit, stop):
        assert stop == {2}
        self.log.append(("run", self.name))
        taken = self.seconds[self.log.count(("run", self.name)) - 1]
        return Run(self.tokens, taken, len(self.tokens), self.traced)


def compared(others, log, repeats=3, once=()):
    baseline: Any = Scripted(BASELINE, [1.0, 2.0, 4.0], log)
    report = compare(
        baseline, others, {"w": [1, 2]}, TOKENIZER, max_tokens=5, repeats=repeats, once=once
    )
    return report["workloads"]["w"]["contenders"], report


def test_everyone_is_warm_before_anyone_is_timed_and_the_first_changes():
    log: list[tuple[str, str]] = []
    compared([Scripted("a", [1.0] * 3, log), Scripted("b", [1.0] * 3, log)], log)
    assert log[:3] == [("warm up", name) for name in (BASELINE, "a", "b")]
    runs = [name for what, name in log if what == "run"]
    assert [runs[0:3], runs[3:6], runs[6:9]] == [
        [BASELINE, "a", "b"],
        ["a", "b", BASELINE],
        ["b", BASELINE, "a"],
    ]


def test_those_that_run_once_do():
    log: list[tuple[str, str]] = []
    found, _ = compared([Scripted("slow", [9.0], log)], log, once=["slow"])
    assert log.count(("run", "slow")) == 1
    assert found["slow"]["speed_up"]["median"] == 1 / 9
    assert len(found[BASELINE]["seconds"]) == 3


def test_speed_ups_are_of_runs_of_the_same_repeat():
    log: list[tuple[str, str]] = []
    found, _ = compared([Scripted("a", [0.5, 1.0, 1.0], log)], log)
    gain = found["a"]["speed_up"]
    # The machine slowed down from repeat to repeat; ratios of medians would give 2 for all.
    assert (gain["least"], gain["median"], gain["most"]) == (2.0, 2.0, 4.0)


def test_what_was_traced_on_the_clock_and_other_ids_are_seen_in_the_table():
    log: list[tuple[str, str]] = []
    _, report = compared(
        [Scripted("a", [1.0] * 3, log, tokens=[1, 2], traced=True)], log, repeats=1
    )
    text = table(report)
    assert "traced on the clock" in text
    assert "one ends at 2" in text
