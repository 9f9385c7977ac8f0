#!/usr/bin/env bash
# Tune targets on this machine's GPU and compare each in a fresh process:
#   bash benchmarks/gpu_session.sh RESULTS_DIR BUDGET TARGET=SHAPE ...
set -uo pipefail
results=$1 budget=$2
shift 2
for pair in "$@"; do
    target=${pair%=*} shape=${pair#*=}
    echo "== $target $shape"
    python3 -m advisor tune "$target" --shape "$shape" --budget "$budget"
    python3 benchmarks/compare.py "$target" --shape "$shape" --free --results "$results"
done
