"""mlx-lm and mlxspec on the same texts in one run: contenders, workloads, results, pictures."""

from mlxspec.benchmark.comparison import BASELINE, compare, table
from mlxspec.benchmark.contenders import Contender, MlxLmPlain, MlxLmSpeculative, Mlxspec, Run
from mlxspec.benchmark.provenance import provenance, write_json
from mlxspec.benchmark.spread import Spread
from mlxspec.benchmark.tables import markdown_table
from mlxspec.benchmark.workloads import NAMES, Workload, load_workload, read_prompts

__all__ = [
    "BASELINE",
    "NAMES",
    "Contender",
    "MlxLmPlain",
    "MlxLmSpeculative",
    "Mlxspec",
    "Run",
    "Spread",
    "Workload",
    "compare",
    "load_workload",
    "markdown_table",
    "provenance",
    "read_prompts",
    "table",
    "write_json",
]
