"""Drafters: cheap guesses at the tokens that follow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxspec.drafting.adaptive import AdaptiveDraftCount
from mlxspec.drafting.chain import Chain
from mlxspec.drafting.lookup import PromptLookup
from mlxspec.drafting.protocol import Drafter, TargetedDrafter

if TYPE_CHECKING:
    from mlxspec.drafting.device import DeviceDraft
    from mlxspec.drafting.model import DraftModel

__all__ = [
    "AdaptiveDraftCount",
    "Chain",
    "DeviceDraft",
    "DraftModel",
    "Drafter",
    "PromptLookup",
    "TargetedDrafter",
]

# What needs mlx; a mistyped command must not wait for it.
_HOMES = {"DeviceDraft": "device", "DraftModel": "model"}


def __getattr__(name: str) -> Any:
    """Import at the first use."""
    if name in _HOMES:
        globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
