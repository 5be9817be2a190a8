"""Text and tokens from a model: `generate`, `stream_generate` and `generate_step`, as mlx-lm's."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from mlxspec.assembly import make_decoder
from mlxspec.callers import require_text
from mlxspec.constraints.grammar import Grammar
from mlxspec.constraints.protocol import Constraint
from mlxspec.decoding import Emission, SpeculationStats
from mlxspec.decoding.emission import token_set
from mlxspec.decoding.stops import StopStrings
from mlxspec.engine.protocol import ProgressCallback

_CHOOSING = threading.Lock()


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, field for field, and what speculation did.

    Attributes:
        reused_tokens: How many of the prompt's tokens the engine held already: `prompt_tps` counts
            the others.
        stats: The counters of the generation so far; one live object in all its responses.
    """

    reused_tokens: int = 0
    stats: SpeculationStats | None = None


def generate_step(
    prompt: Sequence[int] | mx.array | np.ndarray,
    model: nn.Module,
    *,
    max_tokens: int = 256,
    stop_tokens: Collection[int] = (),
    prompt_progress_callback: ProgressCallback | None = None,
    **options: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """Generate token by token, as mlx-lm's `speculative_generate_step` does.

    Args:
        prompt: Token ids, [n].
        model: A model of mlx-lm.
        max_tokens: Most tokens to emit; -1 goes on until the context ends.
        stop_tokens: Ids that end the text; the one that does is the last yielded.
        prompt_progress_callback: Called with (prompt tokens processed, prompt tokens).
        **options: How to draft and to choose, such as `prompt_lookup=True`, `draft_model`, `temp`:
            see `mlxspec.make_decoder`.

    Returns:
        A generator of (token id, log-probabilities [vocab] in the model's dtype, whether it was
        drafted). The log-probabilities are lazy: nothing is computed for them unless they are
        used, and until then they keep their tile's logits in memory and belong to the thread
        that drew them from the generator. Plain steps are submitted one ahead, and what is used
        of a step is computed after the next. Close the generator, or let it end, before you use its
        engine for something else. Weights changed in place go unnoticed: see `forget_engines`.

    Raises:
        ValueError: An argument is out of range or cannot be honoured.
        UnsupportedModel: The static engine cannot take the model.
    """
    emissions, _ = _begin(model, prompt, max_tokens, stop_tokens, prompt_progress_callback, options)

    def steps() -> Generator[tuple[int, mx.array, bool], None, None]:
        with closing(emissions):
            for emission in emissions:
                assert emission.logprobs is not None
                yield emission.token, emission.logprobs, emission.from_draft

    return steps()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array | np.ndarray,
    max_tokens: int = 256,
    *,
    stop_tokens: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    json_schema: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    prompt_progress_callback: ProgressCallback | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text piece by piece, as mlx-lm's function of this name does.

    Args:
        model: A model of mlx-lm.
        tokenizer: Its tokenizer: mlx-lm's wrapper, or one of transformers.
        prompt: Text, or token ids [n].
        max_tokens: Most tokens to emit; -1 goes on until the context ends.
        stop_tokens: Ids that end the text beside the tokenizer's own end tokens.
        stop_strings: What ends the text; none of it is in the text. The token that completes one
            is the last.
        json_schema: A JSON schema, or its text: the output is JSON that satisfies it.
        regex: A regular expression that the whole output matches; mlx-lm's detokenizers leave
            out a space before the first word.
        prompt_progress_callback: Called with (prompt tokens processed, prompt tokens).
        **options: How to draft and to choose, such as `prompt_lookup=True`, `draft_model`, `temp`:
            see `mlxspec.make_decoder`.

    Returns:
        A generator of one response per token. The last one has a `finish_reason`; an end token
        is its `token` and counts, and is not in the text. `logprobs` is lazy as `generate_step`'s
        is: until it is used it keeps its tile's logits in memory, and belongs to the thread that
        drew the response from the generator.

    Raises:
        GrammarError: A schema or regular expression that is none, that is not supported, or that
            no text satisfies.
        ValueError: An argument is out of range or cannot be honoured.
        UnsupportedModel: The static engine cannot take the model.
    """
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    stops = StopStrings(stop_strings)
    options = options | _constraint(tokenizer, json_schema, regex, options)
    ids = encode(tokenizer, prompt) if isinstance(prompt, str) else prompt
    ends = [*tokenizer.eos_token_ids, *stop_tokens]
    options = {"tokenizer": tokenizer} | options
    emissions, stats = _begin(model, ids, max_tokens, ends, prompt_progress_callback, options)
    return _responses(model, tokenizer, len(ids), emissions, stops, stats)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array | np.ndarray,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate a whole text, as mlx-lm's function of this name does.

    Args:
        model: A model of mlx-lm.
        tokenizer: Its tokenizer.
        prompt: Text, or token ids [n].
        verbose: Print the text as it comes, then mlx-lm's figures and the speculation's.
        **options: The other arguments of `stream_generate`, and those of `mlxspec.make_decoder`:
            `max_tokens`, `prompt_lookup=True`, `draft_model`, `temp`, `seed`, `engine`, ...
    """
    pieces = []
    response = None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **options):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print()
        print("=" * 10)
        print(report(response))
    return "".join(pieces)


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a prompt, with the special tokens unless the text begins with one already.

    Raises:
        ValueError: It is no text.
    """
    require_text("prompt", text)
    bare = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=bare)


def report(response: GenerationResponse) -> str:
    """The lines that mlx-lm prints after a text, and what there is to say about speculation."""
    processed = response.prompt_tokens - response.reused_tokens
    beside = f" beside {response.reused_tokens} reused" if response.reused_tokens else ""
    lines = [
        f"Prompt: {processed} tokens{beside}, {response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    if response.stats is not None:
        lines.append(response.stats.summary())
    return "\n".join(lines)


def _flushed(detokenizer: StreamingDetokenizer) -> str:
    """What a detokenizer would give out if no token followed.

    It holds back spaces and unfinished characters, while a stop string ends a text at the token
    that completes it and not one later.
    """
    peek = copy.copy(detokenizer)
    peek.finalize()
    return peek.last_segment


def _constraint(
    tokenizer: TokenizerWrapper,
    json_schema: Mapping[str, Any] | bool | str | None,
    regex: str | None,
    options: Mapping[str, Any],
) -> dict[str, Constraint]:
    """The one constraint that is asked for, if any."""
    asked = [json_schema, regex, options.get("constraint")]
    if sum(value is not None for value in asked) > 1:
        raise ValueError("json_schema, regex and constraint: give one of them, not several")
    if json_schema is not None:
        grammar = Grammar.from_json_schema(json_schema)
    elif regex is not None:
        grammar = Grammar.from_regex(regex)
    else:
        return {}
    for note in grammar.notes:
        warnings.warn(f"json_schema: {note}", UserWarning, stacklevel=3)
    return {"constraint": grammar.bind(tokenizer)}


def _begin(
    model: nn.Module,
    prompt: Sequence[int] | mx.array | np.ndarray,
    max_tokens: int,
    stop_tokens: Collection[int],
    progress: ProgressCallback | None,
    options: Mapping[str, Any],
) -> tuple[Generator[Emission, None, None], SpeculationStats]:
    """Choose an engine and hold it, in one step: two threads must not be given the same one."""
    with _CHOOSING:
        decoder = make_decoder(model, **options)
        if options.get("constraint") is not None:
            stop_tokens = token_set(stop_tokens) | token_set(options["constraint"].end_tokens)
        emissions = decoder.generate(
            prompt, max_tokens=max_tokens, stop_tokens=stop_tokens, progress=progress
        )
    return emissions, decoder.stats


def _responses(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    emissions: Generator[Emission, None, None],
    stops: StopStrings,
    stats: SpeculationStats,
) -> Generator[GenerationResponse, None, None]:
    detokenizer = tokenizer.detokenizer
    prompt_seconds = 0.0
    count = reused = 0
    reused_before = stats.reused_tokens
    begin = time.perf_counter()
    with wired_limit(model), closing(emissions):
        for emission in emissions:
            count += 1
            if count == 1:
                prompt_seconds = time.perf_counter() - begin
                reused = stats.reused_tokens - reused_before
                begin = time.perf_counter()
            reason = emission.finish_reason
            if reason != "stop":
                detokenizer.add_token(emission.token)
            if stops.strings and stops.completed_by(_flushed(detokenizer)):
                reason = "stop"
            if reason is not None:
                detokenizer.finalize()
            text = stops.feed(detokenizer.last_segment, last=reason is not None)
            assert emission.logprobs is not None
            yield GenerationResponse(
                text=text,
                token=emission.token,
                logprobs=emission.logprobs,
                from_draft=emission.from_draft,
                prompt_tokens=prompt_tokens,
                prompt_tps=(prompt_tokens - reused) / prompt_seconds,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - begin),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
                reused_tokens=reused,
                stats=stats,
            )
            if reason is not None:
                return
