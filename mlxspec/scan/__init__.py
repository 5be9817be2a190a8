"""The scan: from rows of logits to the tokens they choose, with one meaning on every backend."""

from mlxspec.scan.check import KernelVerdict, check_kernels
from mlxspec.scan.row_scan import Agreement, LogitRowScan, RowScan
from mlxspec.scan.sampled_scan import SampledRowScan, SampledScan

__all__ = [
    "Agreement",
    "KernelVerdict",
    "LogitRowScan",
    "RowScan",
    "SampledRowScan",
    "SampledScan",
    "check_kernels",
]
