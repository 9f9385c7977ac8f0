# `advisor fit` for one script under a limit, and its run in a fresh process:
#
#     bash fit.sh NAME GIB STEPS OUT COMMAND...
#
# in the script's folder. NAME: of the files in OUT; COMMAND: the script and its arguments, without
# python. The run is ended after TIMEOUT seconds (200).
set -u
name=$1 gib=$2 steps=$3 out=$4
shift 4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command=(python3 "$here/capped.py" "$gib" "$@")
began=$SECONDS
python3 -m advisor fit --memory "${gib}GiB" --budget 180s -- "${command[@]}" > "$out/$name-$gib-fit.txt" 2>&1
echo "$name fit: exit code $?, $((SECONDS - began)) s" >> "$out/times"
ADVISOR_LOG=info STEPS=$steps REPORT="$out/$name-$gib-run.jsonl" timeout "${TIMEOUT:-200}" \
    python3 -m advisor run -- "${command[@]}" > "$out/$name-$gib-run.txt" 2>&1
echo "$name run: exit code $?, $((SECONDS - began)) s" >> "$out/times"
