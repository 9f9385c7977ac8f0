# The usual answers to "out of memory", for GPT-2 medium by run_clm.py at a limit of GPU memory:
#
#     bash usual.sh GIB OUT COMMAND... -- WAY...
#
# in the script's folder. COMMAND: run_clm.py and its arguments; WAY: one of the ways below.
set -u
gib=$1 out=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command=()
while [ "$1" != -- ]; do command+=("$1") && shift; done
shift
declare -A ways=(
    [checkpointing]="--gradient_checkpointing True"
    [checkpointing-bf16]="--gradient_checkpointing True --bf16 True"
    [compile-bf16]="--torch_compile True --bf16 True"
    [compile-checkpointing-bf16]="--torch_compile True --bf16 True --gradient_checkpointing True"
    [auto-batch]="--auto_find_batch_size True"
    [auto-batch-bf16]="--auto_find_batch_size True --bf16 True"
    [zero-offload]="--deepspeed $here/zero_offload.json"
    [zero-offload-bf16]="--deepspeed $here/zero_offload.json --bf16 True"
    [zero-offload-bf16-checkpointing]="--deepspeed $here/zero_offload.json --bf16 True --gradient_checkpointing True"
)
# DeepSpeed expects what a launcher sets.
alone="MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 DS_SKIP_CUDA_CHECK=1"
for way in "$@"; do
    began=$SECONDS
    case $way in zero-*) set_by="$alone" ;; *) set_by="" ;; esac
    env $set_by SKIP=10 STEPS=40 REPORT="$out/usual-$way.jsonl" timeout 110 \
        python3 "$here/capped.py" "$gib" "${command[@]}" ${ways[$way]} > "$out/usual-$way.txt" 2>&1
    echo "$way: exit code $?, $((SECONDS - began)) s" >> "$out/times"
done
