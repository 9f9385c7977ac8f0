#!/usr/bin/env bash
# Tune targets on this machine's GPU and compare each in a fresh process. Each is its name, a blank,
# and the options that both commands take:
#   bash benchmarks/gpu_session.sh RESULTS_DIR 'TARGET --shape SHAPE ...' ...
set -uo pipefail
results=$1
shift
for job in "$@"; do
    read -ra given <<<"$job"
    echo "== $job"
    python3 -m advisor tune "${given[@]}"
    python3 benchmarks/compare.py "${given[@]}" --free --results "$results"
done
