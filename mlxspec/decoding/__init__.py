"""Decoding: the rounds of draft, verify, accept and rewind."""

from mlxspec.decoding.acceptance import (
    Acceptance,
    CallersChoice,
    Choice,
    ModelsChoice,
    RejectionSampling,
)
from mlxspec.decoding.decoder import SpeculativeDecoder
from mlxspec.decoding.emission import Emission
from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.sampling import Sampling
from mlxspec.decoding.stats import SpeculationStats

__all__ = [
    "Acceptance",
    "CallersChoice",
    "Choice",
    "Emission",
    "ModelsChoice",
    "RejectionSampling",
    "Sampling",
    "SpeculationStats",
    "SpeculativeDecoder",
    "SpeculativeDecodingOptions",
]
