"""Models by name: the demo models, local folders and the hub."""

from .demo import cache_dir, demo_folder, is_ready
from .loading import load, load_config, resolve
from .registry import DEMO_MODELS, VARIANTS, DemoModel, demo_names

__all__ = [
    "DEMO_MODELS",
    "VARIANTS",
    "DemoModel",
    "cache_dir",
    "demo_folder",
    "demo_names",
    "is_ready",
    "load",
    "load_config",
    "resolve",
]
