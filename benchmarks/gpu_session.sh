#!/usr/bin/env bash
# Tune targets, one on each GPU of this machine at once, and compare each in a fresh process; then
# the GPU tests, on the first GPU as soon as it is free, and what a lookup costs, once all is quiet.
# Each target is its name, a blank, and the options that tuning takes; the last one, which is looked
# up, has a shape alone:
#   bash benchmarks/gpu_session.sh RESULTS_DIR 'TARGET --shape SHAPE ...' ...
# MORE: options for tuning alone, such as --budget 2m; COMPARE: those for comparing alone.
# LIMIT: seconds after which all of it ends, with what there is by then. ALONE, TOGETHER: processes
# that look up one after another, and at once.
set -uo pipefail
results=$1
shift
jobs=("$@")
limit=${LIMIT:-3600}
lookups_s=65 # kept for the lookups
export ADVISOR_CACHE=${ADVISOR_CACHE:-dir:$(mktemp -d)}
export PYTHONUNBUFFERED=1
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
((gpus)) || gpus=1

# Run a command within the limit less so many seconds, and say how it ended.
within() {
    local reserve=$1 began=$SECONDS status=0
    shift
    local left=$((limit - reserve - SECONDS))
    if ((left < 1)); then
        echo "-- no time is left for: $*"
        return
    fi
    timeout -k 5 "$left" "$@" || status=$?
    echo "-- exit code $status after $((SECONDS - began)) s, $SECONDS s in all: $*"
}

run() {
    local given
    read -ra given <<<"$1"
    echo "== $1"
    # shellcheck disable=SC2086
    within "$lookups_s" python3 -m advisor tune "${given[@]}" ${MORE:-}
    # shellcheck disable=SC2086
    within "$lookups_s" python3 benchmarks/compare.py "${given[@]}" ${COMPARE:-} --results "$results"
}

gpu_tests() {
    local files
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py')
    within "$lookups_s" python3 -m pytest -m gpu -q -p no:cacheprovider --durations=5 "${files[@]}"
}

mkdir -p "$results"
for ((gpu = 0; gpu < gpus; gpu++)); do
    {
        export CUDA_VISIBLE_DEVICES=$gpu
        for ((number = gpu; number < ${#jobs[@]}; number += gpus)); do
            run "${jobs[number]}" >"$results/session-$number.log" 2>&1
        done
        # NVML counts from the first GPU whatever is visible, and so do the tests that ask it.
        ((gpu)) || gpu_tests >"$results/gpu_tests.log" 2>&1
    } &
done
wait
grep -hE '^==| samples/s   |did not run|^failed:|not verified' "$results"/session-*.log
grep -hE '^(FAILED|ERROR|=+ .* in |[0-9]+ (passed|failed)|-- exit|-- no time)' \
    "$results"/session-*.log "$results/gpu_tests.log"
within 30 python3 -m advisor export "$results/records.pack"
read -ra given <<<"${jobs[-1]}"
within 0 python3 benchmarks/apply_cost.py "${given[@]}" "$ADVISOR_CACHE" --alone "${ALONE:-8}" \
    --together "${TOGETHER:-64}" --results "$results"
