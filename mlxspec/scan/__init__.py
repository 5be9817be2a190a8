"""The scan: from rows of logits to the tokens they choose, with one meaning on every backend."""

from mlxspec.scan.row_scan import Agreement, LogitRowScan, RowScan

__all__ = ["Agreement", "LogitRowScan", "RowScan"]
