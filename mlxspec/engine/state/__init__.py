"""State of fixed shape under unmodified mlx-lm models: slots, rings, recurrent states."""

from mlxspec.engine.state.frame import TileFrame
from mlxspec.engine.state.image import StateImage
from mlxspec.engine.state.layout import StateLayout, foreign_kinds, layer_kind
from mlxspec.engine.state.model_state import ModelState
from mlxspec.engine.state.quantized import KVQuantization
from mlxspec.engine.state.ring import RingRule

__all__ = [
    "KVQuantization",
    "ModelState",
    "RingRule",
    "StateImage",
    "StateLayout",
    "TileFrame",
    "foreign_kinds",
    "layer_kind",
]
