"""mlxspec: language models on Apple silicon generate faster, without changing one token."""

from mlxspec._version import __version__
from mlxspec.decoding import (
    Emission,
    SpeculationStats,
    SpeculativeDecoder,
    SpeculativeDecodingOptions,
)
from mlxspec.drafting import Drafter, PromptLookup
from mlxspec.engine import (
    Capture,
    DynamicShapeEngine,
    SpeculativeEngine,
    StaticShapeEngine,
    VerifyRows,
)
from mlxspec.errors import (
    DemoModelError,
    DrafterError,
    EngineBusy,
    MlxspecError,
    ModelNotFound,
    NonFiniteLogits,
    RewindRefused,
    UnsupportedModel,
)
from mlxspec.generation import GenerationResponse, generate, generate_step, stream_generate
from mlxspec.scan import LogitRowScan, RowScan

__all__ = [
    "Capture",
    "DemoModelError",
    "Drafter",
    "DrafterError",
    "DynamicShapeEngine",
    "Emission",
    "EngineBusy",
    "GenerationResponse",
    "LogitRowScan",
    "MlxspecError",
    "ModelNotFound",
    "NonFiniteLogits",
    "PromptLookup",
    "RewindRefused",
    "RowScan",
    "SpeculationStats",
    "SpeculativeDecoder",
    "SpeculativeDecodingOptions",
    "SpeculativeEngine",
    "StaticShapeEngine",
    "UnsupportedModel",
    "VerifyRows",
    "__version__",
    "generate",
    "generate_step",
    "stream_generate",
]
