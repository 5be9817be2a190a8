"""Drafters: cheap guesses at the tokens that follow."""

from mlxspec.drafting.lookup import PromptLookup
from mlxspec.drafting.protocol import Drafter

__all__ = ["Drafter", "PromptLookup"]
