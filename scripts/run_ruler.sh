#!/usr/bin/env bash
# Runs RULER's tasks on a model at several lengths and prints the table of scores.
#
#   scripts/run_ruler.sh MODEL LENGTHS [--samples N] [--tasks A,B] [--seed N] [--essay FILE] [--out DIR] [FLAG...]
#
# LENGTHS are tokens, such as 4K,64K,1M. All other flags go to `longgen run`: --device, --gpu-memory, --max-len, --raw and
# so on. DIR/data has the prompts and DIR/results the answers; DIR is ruler-MODEL where --out does not say. A run that was
# stopped goes on where it was when the same command is given again; a DIR with answers of another model is refused. PYTHON
# names the interpreter to use.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0"; }
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
(($# >= 2)) || { usage >&2; exit 2; }

python=${PYTHON:-python3}
scripts=$(cd "$(dirname "$0")" && pwd)
model=$1 lengths=$2 out=""
make=() run=()
shift 2
while (($#)); do
    case $1 in
        --samples | --tasks | --seed | --essay | --out)
            (($# >= 2)) || { echo "run_ruler: $1 needs a value" >&2; exit 2; }
            if [[ $1 == --out ]]; then out=$2; else make+=("$1" "$2"); fi
            shift 2
            ;;
        --chat | --raw)
            make+=("$1") run+=("$1")
            shift
            ;;
        *)
            run+=("$1")
            shift
            ;;
    esac
done
out=${out:-ruler-$(basename "$model")}
check=(--results "$out/results")
for flag in ${run[@]+"${run[@]}"}; do
    [[ $flag != --overwrite ]] || check=()
done

made=$("$python" "$scripts/make_ruler.py" --model "$model" --lengths "$lengths" --out "$out/data" ${check[@]+"${check[@]}"} ${make[@]+"${make[@]}"})
files=$("$python" -c 'import json, sys; [print(f"{n}/{t}.jsonl") for n, tasks in json.loads(sys.argv[1]).items() for t in tasks]' "$made")

failed=0
for file in $files; do
    mkdir -p "$(dirname "$out/results/$file")"
    code=0
    "$python" -m longgen run --model "$model" --prompt "$out/data/$file" --output "$out/results/$file" \
        ${run[@]+"${run[@]}"} || code=$?
    # 1: some answers failed, and their lines say why; anything else ends this.
    ((code <= 1)) || exit "$code"
    ((code == 0)) || failed=1
done

"$python" "$scripts/score_ruler.py" "$out/results" --made "$made" || failed=1
exit "$failed"
