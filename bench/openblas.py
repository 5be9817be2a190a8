"""A stand-in for a GPU's memory-bound matmuls on Linux: OpenBLAS under MLX, and proof that it is.

The stock Linux wheel of MLX multiplies by a scalar BLAS, where eight rows cost nearly eight times
one. A GPU reads the weights once for several rows. OpenBLAS on a CPU does too, and it exports the
same functions, so that preloading it replaces the wheel's. On Debian and Ubuntu:

    apt-get update && apt-get install libopenblas0-pthread
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

LIBRARY = "libopenblas.so.0"
_SIZE = 512
_LEAST_GAIN = 3.0


def run_again_with_openblas(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by one of the same command with OpenBLAS preloaded, unless it is."""
    if preloaded():
        return
    print(f"starting again with LD_PRELOAD={LIBRARY}", flush=True)
    environment = os.environ | {"LD_PRELOAD": LIBRARY}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def preloaded() -> bool:
    """Whether this process was asked to preload OpenBLAS."""
    return "openblas" in os.environ.get("LD_PRELOAD", "")


def proof() -> dict[str, object]:
    """Show that OpenBLAS is in this process and multiplies, by name and by speed.

    Returns:
        The library's name and matmul rates of this process and of one without it, in GFLOP/s.

    Raises:
        SystemExit: It is not, and how to mend that.
    """
    mapped = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in mapped}
    # NumPy brings an OpenBLAS of its own under another name, which MLX does not see.
    names = {name for name in names if name.startswith("libopenblas")}
    if not names:
        sys.exit(
            f"OpenBLAS: {LIBRARY} was not loaded. Install it (apt-get install libopenblas0-pthread)"
        )
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-m", "bench.openblas"]
    stock = subprocess.run(command, env=without, capture_output=True, text=True, check=True)
    rates = {"openblas": matmul_gflops(), "stock": float(stock.stdout)}
    if rates["openblas"] < _LEAST_GAIN * rates["stock"]:
        sys.exit(f"OpenBLAS: loaded, and yet MLX multiplies no faster than without it: {rates}")
    return {"library": sorted(names), "matmul_gflops": rates}


def matmul_gflops() -> float:
    """How fast MLX multiplies two f32 matrices of 512 x 512, in GFLOP/s; the best of nine."""
    a, b = mx.random.normal((_SIZE, _SIZE)), mx.random.normal((_SIZE, _SIZE))
    mx.eval(a, b, a @ b)
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        mx.eval(a @ b)
        seconds.append(time.perf_counter() - begin)
    return round(2 * _SIZE**3 / min(seconds) / 1e9, 1)


if __name__ == "__main__":
    print(matmul_gflops())
