"""Contenders in turns on every workload, and what is known of each afterwards."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.benchmark.contenders import Contender, MlxLmPlain, Run, prefilled
from mlxspec.benchmark.spread import Spread
from mlxspec.benchmark.tables import markdown_table

BASELINE = "mlx-lm plain"
# Says which workload, contender and run has ended.
Report = Callable[[str, str, Run], None]


def compare(
    baseline: MlxLmPlain,
    others: Sequence[Contender],
    prompts: Mapping[str, list[int]],
    tokenizer: Any,
    *,
    max_tokens: int,
    repeats: int,
    once: Collection[str] = (),
    report: Report | None = None,
) -> dict[str, Any]:
    """Let every contender answer every prompt, in turns.

    Args:
        baseline: What the others are compared with, in speed and in ids.
        others: The other contenders.
        prompts: Token ids by the workload's name.
        tokenizer: Ends answers at its end tokens, and spells them for the result.
        max_tokens: Most tokens of an answer.
        repeats: Runs of each contender.
        once: Names of contenders that run in the first repeat only.
        report: Called after every measured run.

    Returns:
        "workloads": by name the prompt's length, the answer, and by contender its figures;
        "seconds": how long all of it took. Ready for JSON.
    """
    begin = time.perf_counter()
    contenders: list[Contender] = [baseline, *others]
    stop = set(tokenizer.eos_token_ids)
    workloads = {}
    for name, prompt in prompts.items():
        runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
        for contender in contenders:
            contender.warm_up(prompt, max_tokens)
        for repeat in range(repeats):
            turn = [c for c in contenders if not repeat or c.name not in once]
            first = repeat % len(turn)
            for contender in turn[first:] + turn[:first]:
                run = contender.run(prompt, max_tokens, stop)
                runs[contender.name].append(run)
                if report:
                    report(name, contender.name, run)
        expected = runs[baseline.name]
        workloads[name] = {
            "prompt_tokens": len(prompt),
            "prompt_digest": hashlib.sha256(repr(prompt).encode()).hexdigest()[:16],
            "answer": tokenizer.decode(expected[0].tokens),
            "contenders": {
                contender: _figures(baseline.model, prompt, found, expected)
                for contender, found in runs.items()
            },
        }
    return {"workloads": workloads, "seconds": round(time.perf_counter() - begin, 1)}


def rate(run: Run) -> float:
    """Tokens per second."""
    return len(run.tokens) / run.seconds


def first_difference(
    model: nn.Module, prompt: list[int], tokens: list[int], expected: list[int]
) -> dict[str, Any] | None:
    """Where ids part from those expected, and by how much mlx-lm's logits prefer those.

    Returns:
        None where they are equal, else "at_token" and "logit_margin", which is None where one
        ends and the other goes on.
    """
    if tokens == expected:
        return None
    pairs = enumerate(zip(tokens, expected, strict=False))
    place = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if place is None:
        return {"at_token": min(len(tokens), len(expected)), "logit_margin": None}
    text = prompt + expected[:place]
    logits = model(mx.array([text[-1:]]), cache=prefilled(model, text))[0, -1].astype(mx.float32)
    margin = logits[expected[place]] - logits[tokens[place]]
    return {"at_token": place, "logit_margin": margin.item()}


def table(report: Mapping[str, Any]) -> str:
    """The result as a table for a person."""
    rows = []
    for workload, found in report["workloads"].items():
        for name, figures in found["contenders"].items():
            gain = figures["speed_up"]
            rows.append(
                (
                    workload,
                    name,
                    figures["tokens"],
                    f"{figures['tokens_per_second']['median']:.2f}",
                    f"{gain['median']:.2f}x ({gain['least']:.2f} to {gain['most']:.2f})",
                    f"{figures['tokens_per_forward']:.2f}",
                    _ids(figures["first_difference"]),
                    "traced on the clock" * figures["traced_on_the_clock"],
                )
            )
    header = ["workload", "", "tokens", "tokens/s", f"against {BASELINE}", "tokens/forward", "ids"]
    if any(row[-1] for row in rows):
        return markdown_table([*header, ""], rows)
    return markdown_table(header, [row[:-1] for row in rows])


def _figures(
    model: nn.Module, prompt: list[int], runs: list[Run], baseline: list[Run]
) -> dict[str, Any]:
    """What is known of one contender on one workload.

    Speed-ups are of runs of the same repeat, which met the same mood of the machine.
    """
    last = runs[-1]
    gains = [rate(run) / rate(other) for run, other in zip(runs, baseline, strict=False)]
    return {
        "tokens": len(last.tokens),
        "seconds": [round(run.seconds, 4) for run in runs],
        "tokens_per_second": Spread.of([rate(run) for run in runs]).as_dict(),
        "speed_up": Spread.of(gains).as_dict(),
        "forwards": last.forwards,
        "tokens_per_forward": len(last.tokens) / last.forwards,
        "same_ids_in_every_repeat": all(run.tokens == last.tokens for run in runs),
        "traced_on_the_clock": any(run.traced for run in runs),
        "first_difference": first_difference(model, prompt, last.tokens, baseline[-1].tokens),
        **last.details,
    }


def _ids(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "equal"
    if difference["logit_margin"] is None:
        return f"one ends at {difference['at_token']}"
    return f"differ from {difference['at_token']} on (margin {difference['logit_margin']:.1e})"
