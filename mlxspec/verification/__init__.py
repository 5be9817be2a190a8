"""Proof on the user's machine: the text is the same whatever is drafted, in whatever tiles."""

from mlxspec.verification.probe import Probe, probe_model
from mlxspec.verification.run import verify_model
from mlxspec.verification.verdict import Check, Difference, Price, Verdict

__all__ = ["Check", "Difference", "Price", "Probe", "Verdict", "probe_model", "verify_model"]
