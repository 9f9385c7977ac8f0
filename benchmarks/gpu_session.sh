#!/usr/bin/env bash
# Tune targets, one on each GPU of this machine at once, and compare each in a fresh process. Each is
# its name, a blank, and the options that tuning takes:
#   bash benchmarks/gpu_session.sh RESULTS_DIR 'TARGET --shape SHAPE ...' ...
# MORE: options for tuning alone, such as --budget 2m; FREE=--free compares the free batch too.
set -uo pipefail
results=$1
shift
gpus=$(nvidia-smi --list-gpus | wc -l)
run() {
    local number=$1
    read -ra given <<<"$2"
    export CUDA_VISIBLE_DEVICES=$((number % gpus))
    # shellcheck disable=SC2086
    {
        echo "== $2"
        time python3 -m advisor tune "${given[@]}" ${MORE:-}
        time python3 benchmarks/compare.py "${given[@]}" ${FREE:-} --results "$results"
    } >"$results/session-$number.log" 2>&1
}
mkdir -p "$results"
number=0
for job in "$@"; do
    run "$number" "$job" &
    number=$((number + 1))
    [ $((number % gpus)) -eq 0 ] && wait
done
wait
cat "$results"/session-*.log
