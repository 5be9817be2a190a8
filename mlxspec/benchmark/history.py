"""Two result files side by side: what became faster or slower, by more than its own spread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxspec.benchmark.spread import Spread
from mlxspec.benchmark.tables import markdown_table

# What has to be equal for the figures to be about mlxspec alone. The load is the machine's mood.
_CIRCUMSTANCES = ("model", "max_tokens", "blas", "draft_model", "num_draft_tokens", "tile_widths")
_MOODS = ("load_average",)


def read_result(file: Path) -> dict[str, Any]:
    """A result file of `mlxspec benchmark` or `bench.compare_mlx_lm`.

    Raises:
        ValueError: It is none.
        OSError: It cannot be read.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"expected a result file in JSON: {problem}") from None
    try:
        for found in result["workloads"].values():
            for figures in found["contenders"].values():
                for name in ("tokens_per_second", "speed_up"):
                    _spread(figures[name])
        result["machine"].items(), result["versions"].items()
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            "expected a result of `mlxspec benchmark`, with machine, versions and workloads"
        ) from None
    return result


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What changed from an older result to a newer one, ready for JSON.

    Returns:
        "circumstances": name -> [old, new] of what differs in machine, versions and options;
        "other_prompts": names of workloads whose prompts are not the same ids;
        "rows": for every workload and contender of both, the ratio of the medians (new over old)
        of "tokens_per_second" and "speed_up", and whether the ranges overlap;
        "only_old" and "only_new": workloads, or contenders of a workload, that the other lacks.
    """
    before, after = _figures_of(old), _figures_of(new)
    rows = []
    for key in (key for key in after if key in before):
        row: dict[str, Any] = {"workload": key[0], "contender": key[1]}
        for measure in ("tokens_per_second", "speed_up"):
            was, now = _spread(before[key][measure]), _spread(after[key][measure])
            row[measure] = {
                "old": was.as_dict(),
                "new": now.as_dict(),
                "ratio": now.median / was.median,
                "within_spread": was.overlaps(now),
            }
        rows.append(row)
    return {
        "old_date": old.get("date"),
        "old_commit": old.get("commit"),
        "circumstances": _unlike(_circumstances(old), _circumstances(new)),
        "other_prompts": [
            name
            for name, now in new["workloads"].items()
            if (then := old["workloads"].get(name)) and not _same_prompt(then, now)
        ],
        "rows": rows,
        "only_old": _missing(before, after),
        "only_new": _missing(after, before),
    }


def differences_page(found: Mapping[str, Any]) -> str:
    """The differences for a person."""
    lines = [f"Against the result of {found['old_date']} (commit {found['old_commit']}):"]
    for name, (old, new) in found["circumstances"].items():
        lines.append(f"  other {name}: {old} then, {new} now")
    lines += [f"  other prompt: {name}" for name in found["other_prompts"]]
    if found["circumstances"] or found["other_prompts"]:
        lines.append("  so the figures below compare more than mlxspec with itself")
    rows = [
        (
            row["workload"],
            row["contender"],
            *(
                cell
                for measure in ("tokens_per_second", "speed_up")
                for cell in (
                    _range(row[measure]["old"]),
                    _range(row[measure]["new"]),
                    _change(row[measure]),
                )
            ),
        )
        for row in found["rows"]
    ]
    header = ("workload", "", "tokens/s then", "now", "", "against mlx-lm then", "now", "")
    if rows:
        lines += ["", markdown_table(header, rows)]
    for name, where in (("only_old", "then only"), ("only_new", "now only")):
        if found[name]:
            lines.append(f"{where}: {'; '.join(found[name])}")
    return "\n".join(lines)


def _figures_of(result: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (workload, contender): figures
        for workload, found in result["workloads"].items()
        for contender, figures in found["contenders"].items()
    }


def _missing(here: Iterable[tuple[str, str]], there: Iterable[tuple[str, str]]) -> list[str]:
    """What only `here` has: whole workloads by name, else "workload / contender"."""
    known = {workload for workload, _ in there}
    missing = [key for key in here if key not in set(there)]
    names = (key[0] if key[0] not in known else " / ".join(key) for key in missing)
    return list(dict.fromkeys(names))


def _same_prompt(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the ids were the same; of older files only their number is known."""
    name = "prompt_digest" if "prompt_digest" in old else "prompt_tokens"
    return old.get(name) == new.get(name)


def _spread(numbers: Mapping[str, float]) -> Spread:
    """A spread of a file, also of one from before quartiles were kept."""
    median = float(numbers["median"])
    return Spread(
        median,
        float(numbers.get("lower_quartile", median)),
        float(numbers.get("upper_quartile", median)),
        float(numbers["least"]),
        float(numbers["most"]),
    )


def _circumstances(result: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: result[name] for name in _CIRCUMSTANCES if name in result}
    if isinstance(options.get("blas"), dict):
        # How fast it multiplied that day is a mood too.
        options["blas"] = options["blas"].get("library")
    machine = {name: what for name, what in result["machine"].items() if name not in _MOODS}
    return options | machine | {f"version of {k}": v for k, v in result["versions"].items()}


def _unlike(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [old[name], new[name]] for name in old if name in new and old[name] != new[name]}


def _range(numbers: Mapping[str, float]) -> str:
    return str(_spread(numbers))


def _change(measure: Mapping[str, Any]) -> str:
    word = ", within spread" if measure["within_spread"] else ""
    return f"{measure['ratio'] - 1:+.1%}{word}"
