"""Drafts before and past the sliding window of the real Gemma 3 270M, by mlxspec and by mlx-lm.

    python -m bench.gemma_window

A text of our own is cut to 300 tokens, which leaves the window of 512 unfilled to the end of the
answer, and to 700, which fills it in the prompt. Greedy plain decoding of each library is compared
with its speculative decoding, id by id. mlxspec drafts by prompt lookup, and by an oracle that
knows the answer, so that any token refused is the engine's fault. mlx-lm drafts with the model
itself at 3 bits. Writes bench/results/gemma_window.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, speculative_generate_step

import mlxspec
from bench.common import RESULTS, ROOT
from mlxspec import Drafter, PromptLookup, SpeculationStats
from mlxspec.benchmark import markdown_table, provenance, write_json
from mlxspec.verification.drafters import Oracle

TEXT = ROOT / "bench" / "texts" / "gemma_window.txt"
WINDOW = 512
MLXSPEC_DRAFT_TOKENS = 7
MLX_LM_DRAFT_TOKENS = 3
DRAFT_BITS = 3
EXCERPT = 24
DRAFTERS = ("lookup", "oracle")


def main() -> None:
    """Measure, write down what was seen, fail if a draft changed a text of mlxspec's."""
    arguments = _parse()
    model, tokenizer = mlxspec.load(arguments.model)
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    if len(text) < max(arguments.prompt_tokens):
        sys.exit(f"--prompt-tokens: {TEXT.name} has {len(text)} tokens")
    draft = _three_bits()
    report = provenance() | {
        "model": arguments.model,
        "window": WINDOW,
        "max_tokens": arguments.max_tokens,
        "mlxspec_draft_tokens": MLXSPEC_DRAFT_TOKENS,
        "mlx_lm_draft_tokens": MLX_LM_DRAFT_TOKENS,
        "mlx_lm_draft_model": f"gemma3:f32, quantised to {DRAFT_BITS} bits by nn.quantize",
        "cases": [],
    }
    for length in arguments.prompt_tokens:
        prompt = text[:length]
        theirs, difference = _mlx_lm(model, draft, tokenizer, prompt, arguments.max_tokens)
        ours = _mlxspec(model, prompt, arguments.max_tokens, theirs)
        report["cases"].append(
            {"prompt_tokens": length, "plain": tokenizer.decode(theirs)} | difference | ours
        )
    page = _page(report)
    print(page)
    write_json(arguments.output.with_suffix(".json"), report)
    arguments.output.with_suffix(".md").write_text(page + "\n")
    if not all(case["mlxspec"][name]["ids_equal"] for case in report["cases"] for name in DRAFTERS):
        sys.exit("a draft changed the text: that is a bug of mlxspec's")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gemma_window", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="gemma3:bf16", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[300, 700], metavar="N")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "gemma_window", help="results without their ending"
    )
    return parser.parse_args()


def _three_bits() -> nn.Module:
    """An imperfect draft: the model once more, in 3 bits.

    Its scales are f32 whatever the target's are, because half-precision ones are many times slower
    on a CPU.
    """
    model, _ = mlxspec.load("gemma3:f32")
    nn.quantize(model, bits=DRAFT_BITS)
    mx.eval(model.parameters())
    return model


def _mlx_lm(
    model: nn.Module, draft: nn.Module, tokenizer: Any, prompt: list[int], limit: int
) -> tuple[list[int], dict[str, Any]]:
    """mlx-lm's plain ids, and where its speculative decoding leaves them."""
    ids = mx.array(prompt)
    plain = [int(token) for token, _ in generate_step(ids, model, max_tokens=limit)]
    print(f"{len(prompt)} tokens, mlx-lm plain: done", flush=True)
    steps = speculative_generate_step(
        ids, model, draft, num_draft_tokens=MLX_LM_DRAFT_TOKENS, max_tokens=limit
    )
    said: list[int] = []
    from_draft = 0
    raised = None
    try:
        for token, _, drafted in steps:
            said.append(int(token))
            from_draft += drafted
    except Exception as problem:  # Whatever it is, it is what the reader is to see.
        raised = f"{type(problem).__name__}: {problem}"
    print(f"{len(prompt)} tokens, mlx-lm speculative: done", flush=True)
    at = first_difference(plain, said)
    found = {
        "tokens": len(said),
        "from_draft": from_draft,
        "raised": raised,
        "ids_equal": at is None,
        "first_difference": at,
    }
    if at is not None:
        agreed = tokenizer.decode(plain[:at])
        found["agreed"] = tokenizer.decode(plain[max(0, at - EXCERPT) : at])
        for name, tokens in (("plain", plain), ("speculative", said)):
            found[f"then_{name}"] = tokenizer.decode(tokens[: at + EXCERPT])[len(agreed) :]
        found["speculative"] = tokenizer.decode(said)
    return plain, {"mlx_lm_speculative": found}


def _mlxspec(
    model: nn.Module, prompt: list[int], limit: int, mlx_lm_plain: list[int]
) -> dict[str, Any]:
    """Our plain ids against mlx-lm's, then each drafter's against our plain ones."""
    plain, rows = [], []
    for token, logprobs, _ in mlxspec.generate_step(prompt, model, max_tokens=limit):
        plain.append(token)
        rows.append(logprobs)
    print(f"{len(prompt)} tokens, mlxspec plain: done", flush=True)
    at = first_difference(plain, mlx_lm_plain)
    found: dict[str, Any] = {
        "plain_equals_mlx_lm": at is None,
        "plain_first_difference": at,
        "margin_there": at
        if at is None
        else (rows[at][plain[at]] - rows[at][mlx_lm_plain[at]]).item(),
    }
    drafters: dict[str, Drafter] = {
        "lookup": PromptLookup(),
        "oracle": Oracle(prompt + plain, lambda index, token: token),
    }
    for name, drafter in drafters.items():
        found[name] = _drafted(model, prompt, drafter, plain)
        print(f"{len(prompt)} tokens, mlxspec {name}: {found[name]}", flush=True)
    return {"mlxspec": found}


def _drafted(
    model: nn.Module, prompt: list[int], drafter: Drafter, plain: list[int]
) -> dict[str, Any]:
    stats = SpeculationStats()
    steps = mlxspec.generate_step(
        prompt,
        model,
        drafter=drafter,
        num_draft_tokens=MLXSPEC_DRAFT_TOKENS,
        max_tokens=len(plain),
        stats=stats,
    )
    said = [token for token, _, _ in steps]
    return {
        "ids_equal": said == plain,
        "first_difference": first_difference(plain, said),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance": stats.acceptance_rate,
        "forwards": stats.forwards,
        "tokens_per_forward": stats.tokens_per_forward,
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two texts differ; None where they are equal."""
    if list(one) == list(other):
        return None
    pairs: Iterator[tuple[int, int]] = zip(one, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(one), len(other)),
    )


def _page(report: dict[str, Any]) -> str:
    """The figures as tables, and the excerpt, for a reader who does not know the project."""
    rows = []
    excerpts = []
    for case in report["cases"]:
        ours, theirs = case["mlxspec"], case["mlx_lm_speculative"]
        rows.append(
            [
                case["prompt_tokens"],
                _same(ours["plain_first_difference"], ours["margin_there"]),
                *(
                    f"{_same(ours[name]['first_difference'])}; {ours[name]['accepted']} of "
                    f"{ours[name]['drafted']} accepted ({ours[name]['acceptance']:.1%})"
                    for name in DRAFTERS
                ),
                theirs["raised"] or _same(theirs["first_difference"]),
            ]
        )
        if "agreed" in theirs:
            excerpts.append(
                f"After {case['prompt_tokens']} tokens of prompt and "
                f"{theirs['first_difference']} of answer, `{theirs['agreed'].strip()}` goes on "
                f"under mlx-lm:\n\n```\nplain        {theirs['then_plain']!r}\n"
                f"speculative  {theirs['then_speculative']!r}\n```"
            )
    header = [
        "prompt tokens",
        "mlxspec plain = mlx-lm plain",
        "mlxspec lookup = plain",
        "mlxspec oracle = plain",
        "mlx-lm speculative = mlx-lm plain",
    ]
    machine, versions = report["machine"], report["versions"]
    return "\n\n".join(
        [
            f"# Drafts and the sliding window of {report['window']}",
            f"{report['model']}, greedy, {report['max_tokens']} tokens. mlx-lm's draft is "
            f"{report['mlx_lm_draft_model']}.",
            markdown_table(header, rows),
            "Plain texts of two libraries may part in half precision: once a window has wrapped, "
            "mlx-lm's cache sums the same keys in another order. `ahead by` is the difference of "
            "mlxspec's log-probabilities of the two tokens. Lookup's acceptance is a matter of the "
            "text; an oracle's is below 100 % only where an engine is wrong.",
            *excerpts,
            f"mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}, {machine['processor']}, "
            f"{machine['cores']} cores, {machine['device']}, {report['date']}.",
        ]
    )


def _same(difference: int | None, margin: float | None = None) -> str:
    """Whether two texts are one; if not, where they part, and by how little if that is known."""
    if difference is None:
        return "yes"
    near = "" if margin is None else f" (ahead by {margin:.3g} there)"
    return f"no, other at index {difference}{near}"


if __name__ == "__main__":
    main()
