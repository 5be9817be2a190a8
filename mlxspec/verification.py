"""Proof on the user's machine: the text is the same whatever is drafted, in whatever tiles."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlxspec.decoding import SpeculativeDecoder, SpeculativeDecodingOptions
from mlxspec.drafting import Drafter, PromptLookup
from mlxspec.engine import Capture, StaticShapeEngine
from mlxspec.engine.exactness import width_classes


@dataclass(frozen=True)
class Check:
    """One comparison with plain decoding.

    Attributes:
        name: What was compared.
        equal: Whether every token was the same.
        promised: Whether mlxspec promises it; a difference is then a fault.
        detail: What was seen, for a person.
    """

    name: str
    equal: bool
    promised: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """What `verify_model` found.

    Attributes:
        device: What MLX calls the device.
        versions: Of mlx and mlx-lm.
        tokens: How many tokens were generated.
        classes: Groups of the ladder's widths whose rows are equal bit for bit.
        widths: Those that are decoded in.
        note: What the engine has to say about itself, or None.
        checks: Every comparison.
    """

    device: str
    versions: dict[str, str]
    tokens: int
    classes: list[tuple[int, ...]]
    widths: tuple[int, ...]
    note: str | None
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether everything that is promised holds."""
        return all(check.equal for check in self.checks if check.promised)

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self) | {"passed": self.passed}


class _Oracle:
    """A drafter that knows the text and spoils it in a given way.

    Args:
        text: Prompt and plain output.
        spoil: Takes (index in the draft, right token) and returns what to propose.
    """

    def __init__(self, text: Sequence[int], spoil: Callable[[int, int], int]):
        self._text = text
        self._spoil = spoil

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        right = self._text[len(history) : len(history) + budget]
        return [self._spoil(index, token) for index, token in enumerate(right)]

    def commit(self, length: int) -> None:
        pass

    def reset(self) -> None:
        pass


def verify_model(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_tokens: int = 64,
    report: Callable[[str], None] | None = None,
    **engine_options: Any,
) -> Verdict:
    """Generate plainly, then compare: other widths, drafters good and bad, mlx-lm itself.

    Args:
        model: A model of mlx-lm that the static engine takes.
        prompt: Token ids.
        max_tokens: How much to generate.
        report: Called with the name of each check before it runs.
        **engine_options: See `StaticShapeEngine`.

    Returns:
        The verdict; a difference does not raise.
    """
    say = report or (lambda name: None)
    engine = StaticShapeEngine(model, **engine_options)
    say("plain decoding")
    plain = _generate(engine, prompt, None, max_tokens)
    text = [*prompt, *plain]
    checks = []
    for width in engine.tile_widths:
        say(f"tiles of {width}")
        checks.append(_score(engine, prompt, plain, width))
    for name, drafter in _drafters(text, engine.vocab_size).items():
        say(name)
        drafted = _generate(engine, prompt, drafter, max_tokens)
        checks.append(_compare(engine, f"drafted by {name}", text, drafted, len(prompt), True))
    say("mlx-lm")
    steps = mlx_lm_generate_step(mx.array(list(prompt)), model, max_tokens=len(plain))
    theirs = [int(token) for token, _ in steps]
    checks.append(_compare(engine, "mlx-lm's own text", text, theirs, len(prompt), False))
    say("widths")
    # Measured anew, over the whole ladder: what an engine remembers is not proved by being asked.
    probe = StaticShapeEngine(model, exact=False, **engine_options)
    usable = tuple(w for w in probe.tile_widths if w < probe.max_context_length)
    classes = width_classes(probe, usable)
    versions = {name: version(name) for name in ("mlx", "mlx-lm")}
    device = str(mx.default_device())
    return Verdict(device, versions, len(plain), classes, engine.tile_widths, engine.note, checks)


def _drafters(text: list[int], vocab_size: int) -> dict[str, Drafter]:
    rng = random.Random(0)

    def wrong(token: int) -> int:
        return (token + 1) % vocab_size

    return {
        "prompt lookup": PromptLookup(min_ngram=2),
        "an oracle": _Oracle(text, lambda index, token: token),
        "an oracle that ends wrong": _Oracle(text, lambda i, t: t if i < 2 else wrong(t)),
        "an oracle half wrong": _Oracle(text, lambda i, t: t if rng.random() < 0.5 else wrong(t)),
        "a drafter always wrong": _Oracle(text, lambda index, token: wrong(token)),
    }


def _generate(
    engine: StaticShapeEngine, prompt: Sequence[int], drafter: Drafter | None, max_tokens: int
) -> list[int]:
    options = SpeculativeDecodingOptions(num_draft_tokens=engine.verify_tile_width - 1)
    decoder = SpeculativeDecoder(engine, drafter, options)
    return [emission.token for emission in decoder.generate(prompt, max_tokens=max_tokens)]


def _score(engine: StaticShapeEngine, prompt: Sequence[int], plain: list[int], width: int) -> Check:
    """Feed the plain text in blocks that fill tiles of one width, and compare every choice."""
    text = [*prompt, *plain]
    engine.reset(0)
    engine.prefill(prompt[:-1])
    choices: list[int] = []
    while len(choices) < len(plain):
        position = engine.processed_token_count
        length = min(width, engine.one_forward_draft_budget + 1, len(text) - 1 - position)
        choices += engine.verify(text[position : position + length]).argmax
    return _compare(engine, f"scored in tiles of {width}", text, choices, len(prompt), True)


def _compare(
    engine: StaticShapeEngine,
    name: str,
    text: list[int],
    tokens: list[int],
    prompt_length: int,
    promised: bool,
) -> Check:
    """Compare tokens with the plain text; say how near a tie the first difference is."""
    plain = text[prompt_length:]
    pairs = zip(plain, tokens, strict=False)
    first = next((i for i, (ours, other) in enumerate(pairs) if ours != other), None)
    if first is None:
        if len(plain) == len(tokens):
            return Check(name, True, promised, f"{len(plain)} tokens equal")
        return Check(name, False, promised, f"{len(tokens)} tokens instead of {len(plain)}")
    engine.reset(0)
    engine.prefill(text[: prompt_length + first - 1])
    rows = engine.verify([text[prompt_length + first - 1]], Capture(logits=True))
    assert rows.logits is not None
    row = rows.logits[0].astype(mx.float32)
    margin = abs((row[plain[first]] - row[tokens[first]]).item())
    return Check(
        name,
        False,
        promised,
        f"differs at token {first}: {tokens[first]} instead of {plain[first]}, whose logits are "
        f"{margin:.3g} apart",
    )
