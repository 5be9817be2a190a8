"""Text and tokens from a model: `generate`, `stream_generate` and `generate_step`, as mlx-lm's."""

from __future__ import annotations

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
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxspec.decoding import (
    Emission,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
)
from mlxspec.drafting import Drafter, PromptLookup
from mlxspec.engine import SpeculativeEngine, engine_for
from mlxspec.engine.protocol import ProgressCallback

# Keyword arguments of mlx-lm that cannot be honoured: the value that asks for nothing, and why.
_REFUSED: dict[str, tuple[Any, str]] = {
    "temp": (0.0, "decoding is greedy so far"),
    "sampler": (None, "decoding is greedy so far"),
    "logits_processors": (None, "processors are not run so far"),
    "draft_model": (None, "draft models are not run so far; prompt_lookup=True drafts without one"),
    "prompt_cache": (None, "the state lives in an engine; pass one as engine="),
    "max_kv_size": (None, "a cache that forgets its oldest keys could not be rewound"),
    "kv_bits": (None, "the key-value state is not quantised so far"),
    "input_embeddings": (None, "an engine's history is made of token ids"),
    "stream": (None, "the calling thread's default stream is used"),
}
# Keyword arguments of mlx-lm that do nothing in greedy decoding, and what asks for nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "seed": (None,),
    "top_p": (0.0, 1.0),
    "min_p": (0.0,),
    "min_tokens_to_keep": (1,),
    "top_k": (0,),
    "xtc_probability": (0.0,),
    "xtc_threshold": (0.0, 0.1),
    "xtc_special_tokens": (None,),
    "kv_group_size": (64,),
    "quantized_kv_start": (0, 5000),
}


_CHOOSING = threading.Lock()


@dataclass
class GenerationResponse(MlxLmResponse):
    """mlx-lm's response, field for field, and what speculation did.

    Attributes:
        stats: The counters of the generation so far; one live object in all its responses.
    """

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
        **options: See `make_decoder`.

    Returns:
        A generator of (token id, log-probabilities [vocab] in the model's dtype, whether it was
        drafted). The log-probabilities are lazy: nothing is computed for them unless they are
        used. Close the generator, or let it end, before you use its engine for something else.

    Raises:
        ValueError: An argument is out of range or cannot be honoured.
        UnsupportedModel: The static engine cannot take the model.
    """
    emissions, _ = _begin(model, prompt, max_tokens, stop_tokens, prompt_progress_callback, options)

    def steps() -> Generator[tuple[int, mx.array, bool], None, None]:
        with closing(emissions):
            for emission in emissions:
                yield emission.token, log_probabilities(emission), emission.from_draft

    return steps()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array | np.ndarray,
    max_tokens: int = 256,
    *,
    prompt_progress_callback: ProgressCallback | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generate text piece by piece, as mlx-lm's function of this name does.

    Args:
        model: A model of mlx-lm.
        tokenizer: Its tokenizer: mlx-lm's wrapper, or one of transformers.
        prompt: Text, or token ids [n].
        max_tokens: Most tokens to emit; -1 goes on until the context ends.
        prompt_progress_callback: Called with (prompt tokens processed, prompt tokens).
        **options: See `make_decoder`.

    Returns:
        A generator of one response per token. The last one has a `finish_reason`; an end token
        is its `token` and counts, and is not in the text.

    Raises:
        ValueError: An argument is out of range or cannot be honoured.
        UnsupportedModel: The static engine cannot take the model.
    """
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ids = encode(tokenizer, prompt) if isinstance(prompt, str) else prompt
    emissions, stats = _begin(
        model, ids, max_tokens, tokenizer.eos_token_ids, prompt_progress_callback, options
    )
    return _responses(model, tokenizer, len(ids), emissions, stats)


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
        **options: See `stream_generate`.
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


def make_decoder(
    model: nn.Module,
    *,
    drafter: Drafter | None = None,
    prompt_lookup: bool = False,
    num_draft_tokens: int | None = None,
    align_proposals: bool = True,
    engine: SpeculativeEngine | str = "static",
    max_context_length: int | None = None,
    tile_widths: Sequence[int] | None = None,
    prefill_step_size: int | None = None,
    stats: SpeculationStats | None = None,
    **mlx_lm_options: Any,
) -> SpeculativeDecoder:
    """The decoder that the functions above run; everything is checked before anything is built.

    Args:
        model: A model of mlx-lm.
        drafter: Guesses the tokens; None decodes plainly.
        prompt_lookup: Draft with `PromptLookup()`.
        num_draft_tokens: Most tokens to draft per round; None is 7.
        align_proposals: Shorten proposals so that one verify is one forward.
        engine: "static" or "dynamic" for an engine that is kept with the model from call to
            call, or an engine of your own, whose sequence is begun anew.
        max_context_length: Most tokens of prompt and output; None is what the config declares.
        tile_widths: Widths of the static engine's decode tiles; None is (1, 2, 4, 8, 16).
        prefill_step_size: Most prompt tokens per forward; None is 2048.
        stats: Counters to add to.
        **mlx_lm_options: mlx-lm's other keyword arguments: refused by name where they ask for
            something that cannot be honoured.

    Raises:
        TypeError: A keyword argument that neither mlxspec nor mlx-lm has.
        ValueError: An argument is out of range, cannot be honoured, or contradicts another.
        UnsupportedModel: The static engine cannot take the model.
    """
    _refuse_options(mlx_lm_options)
    if prompt_lookup and drafter is not None:
        raise ValueError("prompt_lookup and drafter: give one of them, not both")
    if prompt_lookup:
        drafter = PromptLookup()
    options = SpeculativeDecodingOptions(align_proposals=align_proposals)
    if num_draft_tokens is not None:
        options = SpeculativeDecodingOptions(num_draft_tokens, align_proposals)
    engine_options: dict[str, Any] = {
        "max_context_length": max_context_length,
        "tile_widths": tile_widths,
        "prefill_step_size": prefill_step_size,
    }
    asked = [name for name, value in engine_options.items() if value is not None]
    if isinstance(engine, str):
        if engine == "dynamic" and tile_widths is not None:
            raise ValueError("tile_widths: the dynamic engine has no tiles")
        engine = engine_for(model, engine, **engine_options)
    elif asked:
        raise ValueError(f"{', '.join(asked)}: set when the engine is made, not when it is used")
    return SpeculativeDecoder(engine, drafter, options, stats=stats)


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of a prompt, with the special tokens unless the text begins with one already."""
    bare = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=bare)


def log_probabilities(emission: Emission) -> mx.array:
    """A token's row of log-probabilities as mlx-lm gives it, [vocab] in the logits' dtype; lazy."""
    if emission.logits is None:
        raise ValueError("the decoder was not asked to capture logits")
    return emission.logits - mx.logsumexp(emission.logits, keepdims=True)


def report(response: GenerationResponse) -> str:
    """The lines that mlx-lm prints after a text, and one about speculation."""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    if response.stats is not None:
        lines.append(response.stats.summary())
    return "\n".join(lines)


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
        emissions = decoder.generate(
            prompt,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            capture_logits=True,
            progress=progress,
        )
    return emissions, decoder.stats


def _responses(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    emissions: Generator[Emission, None, None],
    stats: SpeculationStats,
) -> Generator[GenerationResponse, None, None]:
    detokenizer = tokenizer.detokenizer
    prompt_seconds = 0.0
    count = 0
    begin = time.perf_counter()
    with wired_limit(model), closing(emissions):
        for emission in emissions:
            count += 1
            if count == 1:
                prompt_seconds = time.perf_counter() - begin
                begin = time.perf_counter()
            if emission.finish_reason != "stop":
                detokenizer.add_token(emission.token)
            if emission.finish_reason is not None:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=emission.token,
                logprobs=log_probabilities(emission),
                from_draft=emission.from_draft,
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tokens / prompt_seconds,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - begin),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=emission.finish_reason,
                stats=stats,
            )


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse mlx-lm's options that cannot be honoured; name those without effect in one warning."""
    idle = []
    for name, value in options.items():
        if name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value is not None and (neutral is None or value != neutral):
                raise ValueError(f"{name}={value!r} cannot be honoured: {reason}")
        elif name in _WITHOUT_EFFECT:
            if not any(value is neutral or value == neutral for neutral in _WITHOUT_EFFECT[name]):
                idle.append(name)
        else:
            raise TypeError(f"unexpected keyword argument {name!r}")
    if idle:
        warnings.warn(
            f"without effect on greedy decoding: {', '.join(idle)}", UserWarning, stacklevel=4
        )
