"""The options of the commands, in groups: mlx-lm's names, meanings and defaults, and what is added.

Every value is checked as it is read; what depends on several options is in `checks`.
"""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Sequence
from typing import Any, NoReturn

from mlxspec.cli.exits import UsageError
from mlxspec.cli.values import (
    adapter_folder,
    existing_file,
    file_to_write,
    json_object,
    logit_biases,
    one_of,
    plain_text,
    real_number,
    schema,
    stop_text,
    temperature,
    truth,
    whole_number,
    widths,
)
from mlxspec.drafting import PromptLookup

DEFAULT_MODEL = "smollm2"
DEFAULT_MIN_NGRAM = PromptLookup().min_ngram
DEFAULT_MAX_NGRAM = PromptLookup().max_ngram
PENALTIES = ("repetition", "presence", "frequency")
_LARGEST_SEED = (1 << 64) - 1


class Parser(ArgumentParser):
    """An argument parser whose errors are one line each, and raised."""

    def __init__(self, **settings: Any):
        # An abbreviation that is clear today may be ambiguous with the next option.
        super().__init__(allow_abbrev=False, **settings)

    def parse(self, argv: Sequence[str] | None) -> Namespace:
        """The options of a command line.

        Raises:
            UsageError: A word that is no option, or a value that its option does not take.
        """
        args, strangers = self.parse_known_args(argv)
        if strangers:
            self._refuse(strangers[0])
        return args

    def given(self, args: Namespace, name: str) -> bool:
        """Whether an option asks for something else than its default; never if there is none."""
        return getattr(args, name, None) != self.get_default(name)

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving with the usage before the message."""
        raise UsageError(message)

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            raise UsageError(f"unexpected word {word!r}; quote a text with spaces")
        known = [flag for action in self._actions for flag in action.option_strings]
        close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"unknown option {word}{meant}")


def flag(name: str) -> str:
    """How an option is written: `max_tokens` is `--max-tokens`."""
    return "--" + name.replace("_", "-")


def add_model_options(parser: ArgumentParser) -> None:
    """Which model, with which tokens at the end."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a demo model, a local folder, or a repository of the Hugging Face hub "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that the model's folder brings",
    )
    group.add_argument(
        "--adapter-path",
        type=adapter_folder,
        metavar="FOLDER",
        help="adapter weights and their config, as mlx_lm.lora saves them",
    )
    group.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=(),
        metavar="TOKEN",
        help="more tokens that end the text",
    )
    group.add_argument(
        "--quantize-activations",
        "-qa",
        action="store_true",
        help="quantize activations as the weights of each layer; needs --engine dynamic",
    )


def add_prompt_options(parser: ArgumentParser) -> None:
    """What the model is asked, and how it is put to it."""
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--prompt",
        "-p",
        type=plain_text,
        default="hello",
        help=r"what to ask; \n and \t stand for a line end and a tab, and '-' reads stdin "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--prefill-response",
        type=plain_text,
        metavar="TEXT",
        help="beginning of the answer, which the model goes on from",
    )
    _add_template_options(group, ignoring="give the model the prompt as it is")
    group.add_argument(
        "--image", nargs="+", default=(), metavar="FILE", help="images; not read yet"
    )
    group.add_argument(
        "--prompt-cache-file",
        type=existing_file,
        metavar="FILE",
        help="what `mlxspec cache-prompt` saved: its text comes before the prompt, and is not "
        "processed again; its model and quantization are used where others are not named",
    )


def add_cached_prompt_options(parser: ArgumentParser) -> None:
    """What is processed ahead, and where it is kept."""
    group = parser.add_argument_group("prompt cache")
    group.add_argument(
        "--prompt",
        "-p",
        type=plain_text,
        required=True,
        help="message to process; what --prompt of `mlxspec generate` asks goes on from it. '-' "
        "reads stdin",
    )
    group.add_argument(
        "--prompt-cache-file",
        dest="saved_to",
        type=file_to_write,
        required=True,
        metavar="FILE",
        help="where to save; a file there is replaced when the new one is complete",
    )
    _add_template_options(group, ignoring="process the prompt as it is")


def add_chat_options(parser: ArgumentParser) -> None:
    """How a conversation is put to the model."""
    group = parser.add_argument_group("conversation")
    _add_template_options(
        group, ignoring="make one running text of the conversation, which the model goes on with"
    )
    group.add_argument(
        "--prompt-cache-file",
        type=existing_file,
        metavar="FILE",
        help="go on with the conversation that /save FILE.safetensors has written; its model and "
        "quantization are used where others are not named",
    )
    group.add_argument(
        "--context-policy",
        type=one_of("stop", "trim"),
        default="stop",
        metavar="{stop,trim}",
        help="where a turn has no room in the context. stop: say so; trim: feed the model the "
        "system prompt and the newest turns alone, as many as leave a quarter of the context "
        "free (default: %(default)s)",
    )


def _add_template_options(group: _ArgumentGroup, *, ignoring: str) -> None:
    group.add_argument(
        "--system-prompt", type=plain_text, metavar="TEXT", help="system message of the chat"
    )
    group.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help=ignoring,
    )
    group.add_argument(
        "--use-default-chat-template",
        action="store_true",
        help="accepted for mlx-lm's sake; tokenizers have no default template any more",
    )
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        metavar="JSON",
        help="variables for the chat template, such as '{\"enable_thinking\": false}'",
    )


def add_constraint_options(parser: ArgumentParser) -> None:
    """What the output must be."""
    group = parser.add_argument_group(
        "constraint",
        "Forbidden tokens are never chosen, and forced ones are drafted, also without a drafter. "
        "The prompt is no part of the output, nor is a given beginning of the answer; --max-tokens "
        "and --stop end it wherever it stands.",
    )
    group.add_argument(
        "--json-schema",
        type=schema,
        metavar="FILE",
        help="a JSON schema that the output satisfies, or a file of one; the output is laid out in "
        "one line, properties in the schema's order",
    )
    group.add_argument(
        "--regex",
        type=plain_text,
        metavar="PATTERN",
        help="a regular expression that the whole output matches (syntax of Rust's regex crate: no "
        "look-around, no back-references); as elsewhere a space before the first word is not "
        "printed",
    )


def add_sampling_options(parser: ArgumentParser, *, seed: int | None = None) -> None:
    """How the next token is chosen; `seed` is the default of --seed, None draws one."""
    group = parser.add_argument_group(
        "sampling", "The same seed gives the same text with and without speculation."
    )
    group.add_argument(
        "--temp",
        type=temperature,
        default=0.0,
        help="temperature; 0 takes the likeliest token, and the other options of this group "
        "have no effect (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=real_number(0, 1),
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens with this much probability (default: %(default)s)",
    )
    group.add_argument(
        "--min-p",
        type=real_number(0, 1),
        default=0.0,
        metavar="P",
        help="drop tokens below this share of the likeliest one's probability "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=whole_number(0),
        default=0,
        metavar="K",
        help="sample among the K likeliest tokens; 0 among all (default: %(default)s)",
    )
    group.add_argument(
        "--xtc-probability",
        type=real_number(0, 1),
        default=0.0,
        metavar="P",
        help="how often the likeliest choices are excluded (default: %(default)s)",
    )
    group.add_argument(
        "--xtc-threshold",
        type=real_number(0, 0.5),
        default=0.1,
        metavar="P",
        help="probability from which a token counts among them (default: %(default)s)",
    )
    group.add_argument(
        "--min-tokens-to-keep",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="tokens that --min-p leaves at least (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=whole_number(0, _LARGEST_SEED),
        default=seed,
        metavar="N",
        help="seed of the random choices (default: "
        + ("one is drawn, and printed with the figures)" if seed is None else "%(default)s)"),
    )


def add_penalty_options(parser: ArgumentParser) -> None:
    """What is done to the logits before a token is chosen."""
    group = parser.add_argument_group(
        "penalties", "Functions of mlx-lm that change the logits, greedy decoding's too."
    )
    effects = {
        "repetition": (
            real_number(0),
            "divides positive logits of earlier tokens, multiplies negative ones",
        ),
        "presence": (real_number(), "is subtracted from the logits of earlier tokens"),
        "frequency": (real_number(), "is subtracted each time the token occurred"),
    }
    for name in PENALTIES:
        kind, effect = effects[name]
        group.add_argument(
            f"--{name}-penalty",
            type=kind,
            default=0.0,
            metavar="X",
            help=f"{effect}; 0 is off (default: %(default)s)",
        )
        group.add_argument(
            f"--{name}-context-size",
            type=whole_number(1),
            default=20,
            metavar="N",
            help="how many tokens of prompt and answer count as earlier (default: %(default)s)",
        )
    group.add_argument(
        "--logit-bias",
        type=logit_biases,
        metavar="JSON",
        help="what to add to the logits of tokens, by id, such as '{\"42\": -100}'",
    )


def add_speculation_options(parser: ArgumentParser) -> None:
    """Where drafts come from and how long they are."""
    group = parser.add_argument_group(
        "speculation", "Guess several tokens and check them in one forward; the text is the same."
    )
    group.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="draft what followed the same tokens earlier in prompt and output",
    )
    group.add_argument(
        "--prompt-lookup-min-ngram",
        type=whole_number(1),
        metavar="N",
        help=f"fewest tokens that must match (default: {DEFAULT_MIN_NGRAM})",
    )
    group.add_argument(
        "--prompt-lookup-max-ngram",
        type=whole_number(1),
        metavar="N",
        help=f"most tokens to match (default: {DEFAULT_MAX_NGRAM})",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a small model with the same vocabulary that drafts, where --prompt-lookup finds "
        "nothing if that is given too: a demo model, a local folder, or a repository of the hub",
    )
    group.add_argument(
        "--draft-p-min",
        type=real_number(0, 1),
        default=0.0,
        metavar="P",
        help="end a draft before the first token to which the draft model gives less than this "
        "probability (default: %(default)s)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=whole_number(0),
        metavar="N",
        help="most tokens to draft at a time; 0 drafts nothing (default: as many as pay)",
    )
    group.add_argument(
        "--adaptive-draft-count",
        action="store_true",
        help="draft as many tokens as pay, by the measured cost of a forward and the acceptance "
        "so far, and none where none pay; on unless --num-draft-tokens is given, which is then "
        "the most",
    )
    group.add_argument(
        "--no-adaptive-draft-count",
        action="store_true",
        help="draft --num-draft-tokens each time, whether they pay or not (default: 7)",
    )
    group.add_argument(
        "--no-align-proposals",
        action="store_true",
        help="do not shorten drafts to what one forward checks",
    )
    group.add_argument(
        "--acceptance",
        type=one_of("coupled", "rejection"),
        default="coupled",
        metavar="{coupled,rejection}",
        help="coupled: the text is that of the same seed without drafts; rejection: the classic "
        "test, another text of the same distribution, needs --temp (default: %(default)s)",
    )


def add_engine_options(parser: ArgumentParser) -> None:
    """How the model is run, and how much it keeps."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine",
        type=one_of("static", "dynamic"),
        default="static",
        metavar="{static,dynamic}",
        help="static: compiled forwards of fixed shape; dynamic: any model of mlx-lm, without "
        "speculation (default: %(default)s)",
    )
    group.add_argument(
        "--tile-widths",
        type=widths,
        metavar="W,W,...",
        help="rows that the compiled forwards may have (default: 1,2,4,8,16, or what the layers "
        "of the model need, of these the ones that compute the same bits on this device)",
    )
    group.add_argument(
        "--no-exact",
        action="store_true",
        help="use all of these widths: faster where some compute other bits, and a near tie may "
        "then fall another way with drafts than without",
    )
    group.add_argument(
        "--max-context-length",
        type=whole_number(2),
        metavar="N",
        help="most tokens of prompt and answer together (default: what the model declares)",
    )
    group.add_argument(
        "--prefill-step-size",
        type=whole_number(1),
        default=2048,
        metavar="N",
        help="prompt tokens processed at a time (default: %(default)s)",
    )
    group.add_argument(
        "--max-kv-size",
        type=whole_number(1),
        metavar="N",
        help="most keys to remember; not possible here",
    )
    group.add_argument(
        "--kv-bits",
        type=one_of(2, 3, 4, 5, 6, 8),
        metavar="BITS",
        help="quantize keys and values to this many bits; needs the static engine (default: "
        "keep them whole)",
    )
    group.add_argument(
        "--kv-group-size",
        type=one_of(32, 64, 128),
        default=64,
        metavar="N",
        help="group size of that quantization (default: %(default)s)",
    )
    group.add_argument(
        "--quantized-kv-start",
        type=whole_number(0),
        default=5000,
        metavar="N",
        help="token from which on they are quantized (default: %(default)s)",
    )


def add_output_options(
    parser: ArgumentParser, *, max_tokens: int = 100, verbose: bool = True
) -> None:
    """How much text, and what is printed beside it.

    Args:
        parser: Where the options are added.
        max_tokens: The default of --max-tokens.
        verbose: Whether there is --verbose.
    """
    group = parser.add_argument_group("output")
    group.add_argument(
        "--max-tokens",
        "-m",
        type=whole_number(1, besides={-1: "no limit but the context"}),
        default=max_tokens,
        metavar="N",
        help="most tokens to generate; -1 goes on until the context is full (default: %(default)s)",
    )
    group.add_argument(
        "--stop",
        type=stop_text,
        nargs="+",
        default=(),
        metavar="TEXT",
        help=r"texts that end the answer and are left out of it; \n and \t stand for a line end "
        "and a tab",
    )
    if verbose:
        group.add_argument(
            "--verbose",
            type=truth,
            default=True,
            metavar="{True,False}",
            help="print figures after the text; False or F prints the text alone "
            "(default: %(default)s)",
        )
    group.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour the text that was drafted; NO_COLOR underlines it instead, and FORCE_COLOR "
        "colours it even where stdout is no terminal",
    )


def lookup_drafter(args: Namespace) -> PromptLookup | None:
    """The drafter that the speculation options ask for."""
    if not args.prompt_lookup:
        return None
    return PromptLookup(*ngram_range(args))


def ngram_range(args: Namespace) -> tuple[int, int]:
    """The fewest and the most tokens that prompt lookup matches."""
    least, most = args.prompt_lookup_min_ngram, args.prompt_lookup_max_ngram
    return (
        DEFAULT_MIN_NGRAM if least is None else least,
        DEFAULT_MAX_NGRAM if most is None else most,
    )
