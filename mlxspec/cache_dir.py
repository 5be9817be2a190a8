"""Where mlxspec keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """``MLXSPEC_CACHE_DIR``, else the user's cache folder; it need not exist yet."""
    chosen = os.environ.get("MLXSPEC_CACHE_DIR")
    # Not Path.expanduser, which raises for a user that does not exist.
    return Path(os.path.expanduser(chosen)) if chosen else platformdirs.user_cache_path("mlxspec")
