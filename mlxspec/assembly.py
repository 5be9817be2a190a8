"""From keyword arguments to a decoder: everything is checked before anything is built."""

from __future__ import annotations

import reprlib
import secrets
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import mlx.nn as nn

from mlxspec.callers import require_drafter, require_engine
from mlxspec.constraints.acceptance import ConstrainedChoice
from mlxspec.constraints.drafting import ConstrainedDrafter
from mlxspec.constraints.lookahead import Lookahead
from mlxspec.constraints.protocol import Constraint
from mlxspec.decoding.acceptance import (
    Acceptance,
    CallersChoice,
    LogitsProcessor,
    ModelsChoice,
    RejectionSampling,
    Sampler,
    checked_processors,
)
from mlxspec.decoding.decoder import SpeculativeDecoder
from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.sampling import Sampling, noise_key
from mlxspec.decoding.stats import SpeculationStats
from mlxspec.drafting import Chain, Drafter, PromptLookup, TargetedDrafter
from mlxspec.drafting.model import DraftModel
from mlxspec.engine import SpeculativeEngine, StaticShapeEngine, engine_for
from mlxspec.engine.pool import Engine, keep_instead
from mlxspec.models.vocabulary import tokenizer_of

_NEEDS_TOKENIZER = (
    "a grammar is matched in a tokenizer's tokens; give "
    "constraint=mlxspec.Grammar.{}.bind(tokenizer)"
)
# Keyword arguments that cannot be honoured, most of them mlx-lm's: the value that asks for
# nothing, and why.
_REFUSED: dict[str, tuple[Any, str]] = {
    "prompt_cache": (
        None,
        "the state lives in an engine: pass one as engine=, which goes on from what it holds of "
        "the prompt; mlxspec.load_prompt_cache(file, engine) reads a file, mlx-lm's too",
    ),
    "max_kv_size": (None, "a cache that forgets its oldest keys could not be rewound"),
    "input_embeddings": (None, "an engine's history is made of token ids"),
    "stream": (None, "the calling thread's default stream is used"),
    "json_schema": (None, _NEEDS_TOKENIZER.format("from_json_schema(schema)")),
    "regex": (None, _NEEDS_TOKENIZER.format("from_regex(pattern)")),
}
# Options of the static engine that the dynamic one lacks.
_STATIC_ONLY = {
    "tile_widths": "it has no tiles",
    "exact": "it has no tiles",
    "kv_bits": "it keeps keys and values whole",
}
# Values that ask for nothing: mlx-lm's defaults, in its functions and on its command line.
_QUANTISES_NOTHING: dict[str, tuple[int | None, ...]] = {
    "kv_group_size": (None, 64),
    "quantized_kv_start": (None, 0, 5000),
}
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    field.name: (field.default, None) for field in fields(Sampling)
} | {
    "top_p": (0.0, 1.0, None),
    "xtc_threshold": (0.0, 0.1, None),
    "xtc_special_tokens": ((), [], None),
}


def make_decoder(
    model: nn.Module,
    *,
    drafter: Drafter | None = None,
    prompt_lookup: bool = False,
    draft_model: nn.Module | None = None,
    tokenizer: Any = None,
    num_draft_tokens: int | None = None,
    adaptive_draft_count: bool | None = None,
    align_proposals: bool = True,
    seed: int | None = None,
    acceptance: str = "coupled",
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    constraint: Constraint | None = None,
    engine: SpeculativeEngine | str | None = None,
    max_context_length: int | None = None,
    tile_widths: Sequence[int] | None = None,
    exact: bool | None = None,
    prefill_step_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int | None = None,
    stats: SpeculationStats | None = None,
    **options: Any,
) -> SpeculativeDecoder:
    """Build the decoder that the functions of `mlxspec.generation` run.

    Args:
        model: A model of mlx-lm.
        drafter: Guesses the tokens; None decodes plainly.
        prompt_lookup: Draft with `PromptLookup()`.
        draft_model: A model of mlx-lm with the target's vocabulary: draft with
            `DraftModel(draft_model)`, after prompt lookup where both are asked for.
        tokenizer: The target's, with which a draft model's vocabulary is compared; None is what
            `mlxspec.load` gave with the model. Without it only the sizes are compared.
        num_draft_tokens: Most tokens to draft per round; None is as many as pay.
        adaptive_draft_count: Draft as many tokens as pay by the measured cost of a tile and the
            acceptance so far, at most `num_draft_tokens`. None: if `num_draft_tokens` is None.
            False: always `num_draft_tokens`, or 7.
        align_proposals: Shorten proposals so that one verify is one forward.
        seed: Of every draw; the same seed gives the same text with and without drafts. None
            draws a seed, which `stats.seed` tells. Greedy decoding ignores it.
        acceptance: "coupled" (the text is plain decoding's, token for token) or "rejection"
            (another text of the same distribution; needs a temperature).
        sampler: mlx-lm's kind of sampler, instead of a temperature: called once per emitted token
            with log-probabilities [1, vocab].
        logits_processors: mlx-lm's kind of processors, called once per emitted token with (prompt
            and output so far [n], logits [1, vocab]).
        constraint: What the output must be, such as `Grammar.from_regex(...).bind(tokenizer)`:
            rows are masked after the processors and before the filters, drafts end where it
            forbids a token and go on where it forces one, also without a drafter. `max_tokens`
            and stop strings end a text wherever it stands.
        engine: "static" (None is the same) or "dynamic" for an engine that is kept with the model
            from call to call and begins every sequence anew; or an engine of your own, which
            goes on from what it holds of the prompt: see `stats.reused_tokens`.
        max_context_length: Most tokens of prompt and output; None is what the config declares.
        tile_widths: Widths of the static engine's decode tiles; None is what the layers take.
        exact: False takes every default width, also those that round differently on this device:
            faster there, and a near tie may then fall another way with drafts than without.
        prefill_step_size: Most prompt tokens per forward; None is 2048.
        kv_bits: Bits of a quantised number of keys and values, static engine; None keeps them
            whole.
        kv_group_size: Numbers that share a scale; None is 64.
        quantized_kv_start: Position from which on keys are seen quantised; None is 5000.
        stats: Counters to add to.
        **options: The attributes of `Sampling` (`temp`, `top_p`, `min_p`, `top_k`, ...), and
            mlx-lm's other keyword arguments, which are refused by name where they ask for
            something that cannot be honoured.

    Raises:
        TypeError: A keyword argument that neither mlxspec nor mlx-lm has.
        ValueError: An argument is out of range, cannot be honoured, or contradicts another.
        UnsupportedModel: The static engine cannot take the model.
    """
    sampling, idle = _sampling(options)
    if not isinstance(prompt_lookup, bool):
        raise ValueError(f"prompt_lookup: expected True or False, got {prompt_lookup!r}")
    drafter = _drafter(drafter, prompt_lookup, draft_model)
    decoding_options = SpeculativeDecodingOptions(
        num_draft_tokens, align_proposals, adaptive_draft_count
    )
    drawn = secrets.randbits(32) if seed is None else seed
    processors = checked_processors(logits_processors)
    rule = _acceptance(acceptance, sampling, drawn, sampler, processors)
    _refuse_constraint(constraint, acceptance)
    engine_options: dict[str, Any] = {
        "max_context_length": max_context_length,
        "tile_widths": None if tile_widths is None else _widths(tile_widths),
        "exact": exact,
        "prefill_step_size": prefill_step_size,
    }
    quantisation = {"kv_group_size": kv_group_size, "quantized_kv_start": quantized_kv_start}
    if kv_bits is not None:
        engine_options |= {"kv_bits": kv_bits, **quantisation}
    else:
        idle += [
            f"{name} (without kv_bits)"
            for name, value in quantisation.items()
            if value not in _QUANTISES_NOTHING[name]
        ]
    if engine is None:
        engine = "static"
    if not isinstance(engine, str):
        require_engine(engine)
        if getattr(engine, "model", model) is not model:
            raise ValueError("engine: it runs another model than the one given; give that one")
        if asked := [name for name, value in engine_options.items() if value is not None]:
            raise ValueError(
                f"{', '.join(asked)}: set when the engine is made, not when it is used"
            )
    elif engine == "dynamic":
        for name, reason in _STATIC_ONLY.items():
            if engine_options.get(name) is not None:
                raise ValueError(f"{name} cannot be honoured by the dynamic engine: {reason}")
    if seed is not None and sampling.greedy:
        idle.append("seed (decoding is greedy)")
    if stats is not None and not isinstance(stats, SpeculationStats):
        raise ValueError(f"stats: expected SpeculationStats, got {stats!r}")
    if idle:
        warnings.warn(f"without effect: {', '.join(idle)}", UserWarning, stacklevel=4)
    own = not isinstance(engine, str)
    if isinstance(engine, str):
        kept = engine_for(model, engine, **engine_options)
        engine = widened_for_drafts(
            kept,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            adaptive_draft_count=adaptive_draft_count,
        )
        if engine is not kept:
            # It is kept so for plain decoding too.
            keep_instead(kept, engine)
    _refuse_counts(sampling, engine.vocab_size)
    if isinstance(drafter, TargetedDrafter):
        known = tokenizer if tokenizer is not None else tokenizer_of(model)
        drafter.require_vocabulary(engine.vocab_size, known)
    stats = SpeculationStats() if stats is None else stats
    if constraint is not None:
        lookahead = Lookahead(constraint, engine.vocab_size)
        drafter = ConstrainedDrafter(drafter, lookahead)
        rule = ConstrainedChoice(lookahead, sampling, noise_key(drawn), stats, processors, sampler)
    decoder = SpeculativeDecoder(
        engine,
        drafter,
        decoding_options,
        acceptance=rule,
        seed=drawn,
        stats=stats,
        reuse_prefix=own,
    )
    decoder.stats.seed = None if sampling.greedy else drawn
    return decoder


def _drafter(
    drafter: Drafter | None, prompt_lookup: bool, draft_model: nn.Module | None
) -> Drafter | None:
    """The drafter that these arguments ask for, cheap guesses first.

    Raises:
        ValueError: A drafter beside something that makes one.
        UnsupportedModel: The static engine cannot take the draft model.
    """
    made: list[Drafter] = []
    for name, asked in (("prompt_lookup", prompt_lookup), ("draft_model", draft_model is not None)):
        if asked and drafter is not None:
            raise ValueError(f"{name} and drafter: give one of them, not both")
    if drafter is not None:
        require_drafter(drafter)
    if prompt_lookup:
        made.append(PromptLookup())
    if draft_model is not None:
        if not isinstance(draft_model, nn.Module):
            raise ValueError(
                f"draft_model: expected a model of mlx-lm, got {draft_model!r}; mlxspec.load(name) "
                "gives one and its tokenizer"
            )
        made.append(DraftModel(draft_model))
    if not made:
        return drafter
    return made[0] if len(made) == 1 else Chain(*made)


def widened_for_drafts(
    engine: Engine,
    *,
    drafter: Drafter | None = None,
    prompt_lookup: bool = False,
    draft_model: nn.Module | None = None,
    num_draft_tokens: int | None = None,
    adaptive_draft_count: bool | None = None,
    **_: Any,
) -> Engine:
    """An engine that nobody uses yet, or an empty one in its place with wider tiles if they pay.

    They can only where drafts are as long as pays. The arguments are those of `make_decoder`,
    which does so with the engines it keeps.
    """
    drafts = drafter is not None or prompt_lookup or draft_model is not None
    options = SpeculativeDecodingOptions(num_draft_tokens, adaptive=adaptive_draft_count)
    if drafts and options.adapts and isinstance(engine, StaticShapeEngine):
        return engine.widened()
    return engine


def _sampling(options: Mapping[str, Any]) -> tuple[Sampling, list[str]]:
    """How to sample, and the options that are accepted and do nothing.

    Raises:
        TypeError: A name that neither mlxspec nor mlx-lm has.
        ValueError: What mlx-lm has and cannot be honoured here.
    """
    names = {field.name for field in fields(Sampling)}
    idle = []
    for name, value in options.items():
        if name in names:
            continue
        if name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value is not neutral:
                raise ValueError(f"{name}={reprlib.repr(value)} cannot be honoured: {reason}")
        else:
            raise TypeError(f"unexpected keyword argument {name!r}")
    plain = {
        name: value.item() if hasattr(value, "item") else value
        for name, value in options.items()
        if name in names
    }
    asked = {name: value for name, value in plain.items() if value not in _ASKS_NOTHING[name]}
    sampling = Sampling(**asked)
    if sampling.greedy:
        idle += [f"{name} (decoding is greedy)" for name in asked]
    return sampling, idle


def _refuse_counts(sampling: Sampling, vocab_size: int) -> None:
    """Refuse filters that count more tokens than there are: mlx-lm's would fail in a forward."""
    if sampling.top_k >= vocab_size:
        raise ValueError(
            f"top_k: expected less than the {vocab_size} tokens of the vocabulary, got "
            f"{sampling.top_k}; 0 keeps all"
        )
    if sampling.min_tokens_to_keep > vocab_size:
        raise ValueError(
            f"min_tokens_to_keep: expected at most the {vocab_size} tokens of the vocabulary, got "
            f"{sampling.min_tokens_to_keep}"
        )


def _acceptance(
    name: str,
    sampling: Sampling,
    seed: int,
    sampler: Sampler | None,
    processors: Sequence[LogitsProcessor],
) -> Acceptance:
    """The rule that these options ask for.

    Raises:
        ValueError: An unknown rule, options that contradict each other, or a seed out of range.
    """
    key = noise_key(seed)
    if name not in ("coupled", "rejection"):
        raise ValueError(f"acceptance: expected 'coupled' or 'rejection', got {name!r}")
    if sampler is not None and sampling != Sampling():
        raise ValueError(
            "sampler: it chooses the token by itself, so temp, top_p and the like have no place; "
            "give one or the other"
        )
    if name == "rejection":
        if sampler is not None or processors:
            raise ValueError(
                "acceptance='rejection' compares distributions, which a sampler or logits "
                "processors of your own do not tell; use acceptance='coupled'"
            )
        if sampling.greedy:
            raise ValueError("acceptance='rejection' needs a temperature: give temp above 0")
        return RejectionSampling(sampling, key, with_logprobs=True)
    if sampler is not None or processors:
        return CallersChoice(processors, sampler, sampling, key)
    return ModelsChoice(sampling, with_logprobs=True)


def _refuse_constraint(constraint: Any, acceptance: str) -> None:
    if constraint is None:
        return
    if not isinstance(constraint, Constraint):
        bind = "; bind it: grammar.bind(tokenizer)" if hasattr(constraint, "bind") else ""
        raise ValueError(
            "constraint: expected something with end_tokens and matcher(), got "
            f"{constraint!r}{bind}"
        )
    if acceptance == "rejection":
        raise ValueError(
            "acceptance='rejection' draws another token where a draft is refused, and drafts that "
            "a constraint cuts would no longer have the drafter's distribution; use "
            "acceptance='coupled'"
        )


def _widths(tile_widths: Any) -> Any:
    """Widths as a tuple of numbers, which engines are kept by; what is none, the engine refuses."""
    values = tile_widths.tolist() if hasattr(tile_widths, "tolist") else tile_widths
    return tuple(values) if isinstance(values, Iterable) else values
