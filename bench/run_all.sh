#!/bin/sh
# All measurements whose results are committed, on a machine that does nothing else meanwhile.
#
#   bench/run_all.sh openblas    under OpenBLAS: the five texts in float32, a draft model that cannot
#                                pay, and the cost of tracing
#   bench/run_all.sh stock       the wheel as it is: two texts in bfloat16, float32 and 4-bit, and the cache
#
# PYTHON names the interpreter, python3 by default.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
case ${1:-} in
openblas)
    "$python" -m bench.trace_cost --openblas
    "$python" -m bench.compare_mlx_lm --setting f32-openblas --repeats 2 --plot
    "$python" -m bench.compare_mlx_lm --setting gemma3-layers --repeats 3 --max-tokens 64 \
        --contenders "mlxspec plain" "mlxspec draft model"
    ;;
stock)
    "$python" -m bench.cache_cost
    "$python" -m bench.plain_steps
    "$python" -m bench.compare_mlx_lm --setting bf16 --workloads copy prose --repeats 2 --plot \
        --contenders "mlxspec plain" "mlxspec lookup"
    for setting in f32 4bit; do
        "$python" -m bench.compare_mlx_lm --setting $setting --workloads copy prose --repeats 2 \
            --max-tokens 60 --contenders "mlxspec plain" "mlxspec lookup"
    done
    ;;
*)
    echo "usage: bench/run_all.sh openblas|stock" >&2
    exit 2
    ;;
esac
