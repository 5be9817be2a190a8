"""mlxspec: language models on Apple silicon generate faster, without changing one token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxspec._version import __version__

if TYPE_CHECKING:
    from mlxspec.assembly import make_decoder
    from mlxspec.constraints.grammar import Grammar, TokenGrammar
    from mlxspec.constraints.protocol import Constraint, TokenMatcher
    from mlxspec.conversation import Conversation, Turn
    from mlxspec.decoding import (
        Emission,
        Sampling,
        SpeculationStats,
        SpeculativeDecoder,
        SpeculativeDecodingOptions,
    )
    from mlxspec.drafting import Chain, DeviceDraft, Drafter, DraftModel, PromptLookup
    from mlxspec.engine import (
        Capture,
        DynamicShapeEngine,
        SpeculativeEngine,
        StaticShapeEngine,
        VerifyRows,
        forget_engines,
    )
    from mlxspec.errors import (
        ContextFull,
        DemoModelError,
        DrafterError,
        EngineBusy,
        GrammarError,
        MlxspecError,
        ModelNotFound,
        NonFiniteLogits,
        PromptCacheError,
        RewindRefused,
        UnsupportedModel,
        VocabularyMismatch,
    )
    from mlxspec.generation import GenerationResponse, generate, generate_step, stream_generate
    from mlxspec.models import load
    from mlxspec.prompt_cache import load_prompt_cache, save_prompt_cache
    from mlxspec.scan import LogitRowScan, RowScan

__all__ = [
    "Capture",
    "Chain",
    "Constraint",
    "ContextFull",
    "Conversation",
    "DemoModelError",
    "DeviceDraft",
    "DraftModel",
    "Drafter",
    "DrafterError",
    "DynamicShapeEngine",
    "Emission",
    "EngineBusy",
    "GenerationResponse",
    "Grammar",
    "GrammarError",
    "LogitRowScan",
    "MlxspecError",
    "ModelNotFound",
    "NonFiniteLogits",
    "PromptCacheError",
    "PromptLookup",
    "RewindRefused",
    "RowScan",
    "Sampling",
    "SpeculationStats",
    "SpeculativeDecoder",
    "SpeculativeDecodingOptions",
    "SpeculativeEngine",
    "StaticShapeEngine",
    "TokenGrammar",
    "TokenMatcher",
    "Turn",
    "UnsupportedModel",
    "VerifyRows",
    "VocabularyMismatch",
    "__version__",
    "forget_engines",
    "generate",
    "generate_step",
    "load",
    "load_prompt_cache",
    "make_decoder",
    "save_prompt_cache",
    "stream_generate",
]

# Where a public name is looked for; the first that has it defines it.
_HOMES = (
    "errors",
    "drafting",
    "scan",
    "engine",
    "decoding",
    "models",
    "constraints.protocol",
    "constraints.grammar",
    "generation",
    "assembly",
    "conversation",
    "prompt_cache",
)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a mistyped command must not wait for mlx."""
    if name in _HOMES:
        return import_module(f"{__name__}.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
