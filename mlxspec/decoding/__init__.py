"""Decoding: the rounds of draft, verify, accept and rewind."""

from mlxspec.decoding.decoder import Emission, SpeculativeDecoder
from mlxspec.decoding.options import SpeculativeDecodingOptions
from mlxspec.decoding.stats import SpeculationStats

__all__ = ["Emission", "SpeculationStats", "SpeculativeDecoder", "SpeculativeDecodingOptions"]
