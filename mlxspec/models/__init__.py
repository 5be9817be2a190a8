"""Models by name: the demo models, local folders and the hub."""

from mlxspec.models.demo import cache_dir, demo_folder, is_ready, prepare
from mlxspec.models.description import ModelDescription, describe
from mlxspec.models.loading import load, load_config, resolve
from mlxspec.models.registry import DEMO_MODELS, VARIANTS, DemoModel, demo_names

__all__ = [
    "DEMO_MODELS",
    "VARIANTS",
    "DemoModel",
    "ModelDescription",
    "cache_dir",
    "demo_folder",
    "demo_names",
    "describe",
    "is_ready",
    "load",
    "load_config",
    "prepare",
    "resolve",
]
