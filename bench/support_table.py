"""Which models of mlx-lm run under which engine: every module is built tiny, run and compared.

    python -m bench.support_table

writes bench/results/support.json and bench/results/support.md. Every module runs in a process of
its own with a time limit, so that a crash is a row of the table. If a model that an engine accepts
is found to answer differently from mlx-lm, nothing is written: that is a mistake in
mlxspec/engine/support.py, and no row of a table.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.models
from mlx_lm.models.cache import make_prompt_cache

from bench.common import RESULTS, ROOT
from mlxspec import DynamicShapeEngine, RewindRefused
from mlxspec.benchmark import provenance, write_json
from mlxspec.engine.support import family_of, why_not_static
from tests.families.exactness import (
    ONE_WIDTH,
    PLANS,
    Case,
    decode,
    examine,
    ladder,
    mlx_lm_tokens,
    stock_case,
)
from tests.families.tiny import tiny_configs, tiny_model

PROMPT_LENGTHS = (1, 40)
TOKENS = 48

EXACT, ONE_WIDTH_ONLY, REFUSED = "exact", "exact with one width", "refused"
NOT_BUILDABLE, WRONG = "not buildable", "wrong"
Row = dict[str, Any]


def main() -> None:
    """Make the table, or with --module one module's part of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.support_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--module", help="examine one module and print what was found as JSON")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a module may take")
    parser.add_argument(
        "--modules", nargs="+", metavar="NAME", help="these modules only; default: all"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "support", help="results without their ending"
    )
    arguments = parser.parse_args()
    if arguments.module:
        print(json.dumps(examine_module(arguments.module)))
        return
    modules = {}
    for name in arguments.modules or sorted(module_names(), key=str.lower):
        modules[name] = in_a_process(name, arguments.timeout)
        print(f"{name:24} {brief(modules[name])}", flush=True)
    wrong = [row["name"] for rows in modules.values() for row in rows or () if is_wrong(row)]
    if wrong:
        sys.exit(f"accepted and wrong, so that no table was written: {', '.join(wrong)}")
    table = provenance() | {
        "checked": {"prompt_lengths": PROMPT_LENGTHS, "tokens": TOKENS, "dtype": "float32"},
        "summary": summary(modules),
        "modules": {name: rows for name, rows in modules.items() if rows is not None},
        "not_models": [name for name, rows in modules.items() if rows is None],
    }
    write_json(arguments.output.with_suffix(".json"), table)
    arguments.output.with_suffix(".md").write_text(page(table), encoding="utf-8")


def module_names() -> list[str]:
    """Every module of mlx_lm.models, whether it holds a model or not."""
    return [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]


def in_a_process(module: str, timeout: float) -> list[Row] | None:
    """What `examine_module` returns; a crash or a hang makes a row too."""
    command = [sys.executable, "-m", "bench.support_table", "--module", module]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return [not_buildable(module, f"no result within {timeout:.0f} seconds")]
    if done.returncode < 0:
        return [not_buildable(module, f"the process died of signal {-done.returncode}")]
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return [not_buildable(module, last)]
    return json.loads(done.stdout.splitlines()[-1])


def examine_module(module: str) -> list[Row] | None:
    """One row per tiny config of a module; None if the module holds no model."""
    names = [name for name in tiny_configs() if name.split("+")[0] == module]
    if not names:
        if hasattr(import_module(f"mlx_lm.models.{module}"), "Model"):
            return [not_buildable(module, "no tiny config has been written for it")]
        return None
    return [examine_config(name) for name in names]


def examine_config(name: str) -> Row:
    """What one tiny model does under both engines."""
    try:
        model = tiny_model(name)
        caches = sorted({type(cache).__name__ for cache in make_prompt_cache(model)})
        cases = [stock_case(model, length, TOKENS) for length in PROMPT_LENGTHS]
        for case in cases:
            if mlx_lm_tokens(model, case.prompt, TOKENS) != case.tokens:
                raise RuntimeError("its log-probabilities have another maximum than its logits")
    except Exception as error:
        return not_buildable(name, f"mlx-lm: {one_line(error)}")
    return {
        "name": name,
        "family": family_of(model),
        "caches": caches,
        "mlx_lm_rows_differ_by": max(case.own_difference for case in cases),
        "static": static_verdict(model, cases),
        "dynamic": dynamic_verdict(model, cases),
    }


def static_verdict(model: nn.Module, cases: Sequence[Case]) -> Row:
    """Whether the static engine takes a model, and if so, under which widths it is exact."""
    reason = why_not_static(model)
    if reason is not None:
        return {"verdict": REFUSED, "why": reason}
    regime = ladder(model)
    found = {
        each: [examine(model, case, each) for case in cases]
        for each in dict.fromkeys((regime, ONE_WIDTH))
    }
    details = {
        str(each): {
            "wrong": [line for finding in findings for line in finding.wrong],
            "rows_differ_from_mlx_lm_by": max(f.stock_difference for f in findings),
            "drafted_rows_differ_from_plain_by": max(f.row_difference for f in findings),
        }
        for each, findings in found.items()
    }
    if not all(
        finding.exact(case)
        for findings in found.values()
        for finding, case in zip(findings, cases, strict=True)
    ):
        return {"verdict": WRONG, "details": details}
    return {"verdict": ONE_WIDTH_ONLY if regime == ONE_WIDTH else EXACT, "details": details}


def dynamic_verdict(model: nn.Module, cases: Sequence[Case]) -> Row:
    """Whether the dynamic engine says what mlx-lm says, with a drafter and after going back too."""
    wrong = []
    rewinds = set()
    for case in cases:
        engine = DynamicShapeEngine(model, max_context_length=case.context_length)
        for plan in (None, PLANS["right"]):
            if decode(engine, case, plan)[0] != case.tokens:
                wrong.append(f"prompt of {len(case.prompt)}: its ids differ")
        middle = len(case.prompt) + TOKENS // 2
        try:
            engine.reset(middle)
        except RewindRefused:
            rewinds.add("refused")
            continue
        rewinds.add("exact")
        rest = [engine.verify([token]).argmax[0] for token in case.text[middle:-1]]
        if rest != case.tokens[TOKENS // 2 + 1 :]:
            wrong.append(f"prompt of {len(case.prompt)}: its ids differ after a rewind")
    return {"verdict": WRONG if wrong else EXACT, "wrong": wrong, "rewind": sorted(rewinds)}


def not_buildable(name: str, why: str) -> Row:
    """The row of a model that does not run here, whichever way."""
    verdict = {"verdict": NOT_BUILDABLE, "why": why}
    return {"name": name, "static": verdict, "dynamic": verdict}


def is_wrong(row: Row) -> bool:
    """Whether an engine took the model and answered otherwise than mlx-lm."""
    return WRONG in (row["static"]["verdict"], row["dynamic"]["verdict"])


def summary(modules: dict[str, list[Row] | None]) -> dict[str, dict[str, int]]:
    """How many modules have which verdict, by the plain config of each."""
    first = [rows[0] for rows in modules.values() if rows is not None]
    return {
        engine: dict(Counter(row[engine]["verdict"] for row in first))
        for engine in ("static", "dynamic")
    }


def page(table: dict[str, Any]) -> str:
    """The table for a reader who does not know the project."""
    versions, where = table["versions"], table["machine"]
    counts = "\n".join(
        f"- {engine} engine: "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        for engine, verdicts in table["summary"].items()
    )
    rows = "\n".join(line(row) for rows in table["modules"].values() for row in rows)
    return f"""# Which models run under which engine

Every module of `mlx_lm.models` in mlx-lm {versions["mlx-lm"]}, built from a tiny config with random
weights and compared with mlx-lm's own greedy generation, token for token: {TOKENS} tokens after
prompts of {", ".join(map(str, PROMPT_LENGTHS))} tokens, in float32.

- **exact**: plain decoding gives mlx-lm's ids. So does speculation with a drafter that is right,
  half right or wrong, and so do rewinds into the middle of a block. Drafted rows of logits equal
  plain ones bit for bit, at every width of a ladder of 1, 2, 4, 8 and 16 rows. Plain rows equal
  those of mlx-lm's own forward bit for bit too. Where a note says "within", windows or recurrent
  states add up in another order, by a share of the largest logit that is no more than a few times
  what mlx-lm's rows change by when it is given several tokens at once.
- **exact with one width**: the same, as long as every forward has the same number of rows, because
  this model's rows depend on how many there are. The engine uses 8, so plain decoding is slower.
- **refused**: the static engine says no before it loads weights, and why. The dynamic engine runs
  the model as mlx-lm does, without speculation.
- **not buildable**: it does not run on the machine that made this table, under mlx-lm either.

A family with a variant (`family+variant`) has a row for each, because the verdict may depend on the
config. The static engine takes a model if its family is exact here and all of its layers are ones
that it can rewind.

{counts}

| family | static engine | dynamic engine | note |
|---|---|---|---|
{rows}

Modules that hold no model: {", ".join(f"`{name}`" for name in table["not_models"])}.

Made by `{table["command"]}` on {table["date"]} with mlxspec {versions["mlxspec"]}, mlx
{versions["mlx"]}, mlx-lm {versions["mlx-lm"]} and Python {versions["python"]}, on
{where["system"]} {where["architecture"]} ({where["device"]}). Details: `support.json`.
"""


def line(row: Row) -> str:
    """One line of the page's table."""
    static, dynamic = row["static"], row["dynamic"]
    notes = []
    if row.get("family", row["name"]) != row["name"].split("+")[0]:
        notes.append(f"built by the code of `{row['family']}`")
    if difference := largest_difference(static):
        notes.append(f"rows within {difference:.0e} of mlx-lm's")
    if dynamic.get("rewind") == ["exact"] and static["verdict"] == REFUSED:
        notes.append("can be rewound under the dynamic engine")
    why = static.get("why", "").removeprefix(f"{row.get('family')}: ").replace("|", "/")
    return (
        f"| `{row['name']}` | {static['verdict']}{why and f' ({why})'} | {dynamic['verdict']} "
        f"| {'; '.join(notes)} |"
    )


def largest_difference(static: Row) -> float:
    """How far the static engine's rows lie from mlx-lm's, at most."""
    return max(
        (detail["rows_differ_from_mlx_lm_by"] for detail in static.get("details", {}).values()),
        default=0.0,
    )


def brief(rows: list[Row] | None) -> str:
    """What a person who waits for the table wants to see."""
    if rows is None:
        return "holds no model"
    return ", ".join(f"{row['static']['verdict']} / {row['dynamic']['verdict']}" for row in rows)


def one_line(error: Exception) -> str:
    """An error's kind and the beginning of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


if __name__ == "__main__":
    main()
