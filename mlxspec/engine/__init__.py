"""Engines: a model and a state that verify blocks of tokens and rewind."""

from mlxspec.engine.dynamic import DynamicShapeEngine
from mlxspec.engine.pool import engine_for, forget_engines
from mlxspec.engine.protocol import Capture, SpeculativeEngine, VerifyRows
from mlxspec.engine.static import StaticShapeEngine

__all__ = [
    "Capture",
    "DynamicShapeEngine",
    "SpeculativeEngine",
    "StaticShapeEngine",
    "VerifyRows",
    "engine_for",
    "forget_engines",
]
