#!/usr/bin/env bash
# Runs a batch to its end, however often it is killed on the way, and brings the results of its shards together.
#
#   scripts/run_batch.sh MODEL PROMPTS.jsonl RESULTS.jsonl SHARDS [OPTION OF LONGGEN RUN...]
#
# The shards are run one after another. In a job array, let job I run `longgen run ... --shard I/SHARDS --output
# RESULTS.jsonl.I-of-SHARDS` and this script afterwards: it finds nothing left to do, and brings them together.
# LONGGEN names the program, if it is not `longgen`. RESULTS.jsonl.made has the checksum of every file that was brought
# together: a RESULTS.jsonl that is there and was not made here is left alone.
#
# Exit code: that of longgen, 1 if some record failed.
set -uo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
(($# >= 4)) || { usage >&2; exit 2; }
model=$1 prompts=$2 results=$3 shards=$4
shift 4
longgen=${LONGGEN:-longgen}

fail() { echo "run_batch: $1" >&2; exit 2; }

[[ $shards =~ ^[1-9][0-9]*$ ]] || fail "SHARDS is '$shards'; write in how many parts to run the batch, such as 4"
for flag in "$@"; do
    case $flag in
        --overwrite | --no-resume)
            fail "$flag would throw away or refuse what a run that was killed has done; leave it out"
            ;;
    esac
done
[[ ! $results -ef $prompts ]] || fail "the results $results are the prompts; give them another name"
if [[ -e $results ]] && ! grep -qsxF "$(cksum <"$results")" "$results.made"; then
    fail "$results is there already and was not made here; move it away, or give another name"
fi

# Bytes of a shard's results, done again or not.
progress_of() { cat "$1" "$1.retried" 2>/dev/null | wc -c; }

# Records of the prompts: lines that are not blank. Prompts in UTF-16, which begin with its mark, are made UTF-8.
count_records() {
    case $(head -c 2 "$prompts" | od -An -tx1 | tr -d ' ') in
        fffe | feff) iconv -c -f UTF-16 -t UTF-8 "$prompts" ;;
        *) cat "$prompts" ;;
    esac | grep -c '[^[:space:]]'
}

# run_shard I FILE OPTION...: until it ends by itself; 0 or 1. Whoever is killed three times in a row without a new
# result is given up.
run_shard() {
    local shard=$1 file=$2 code before idle=0
    shift 2
    while true; do
        before=$(progress_of "$file")
        "$longgen" run --model "$model" --prompt "$prompts" --shard "$shard/$shards" --output "$file" "$@"
        code=$?
        case $code in
            0 | 1 | 2 | 130) return $code ;;
        esac
        if [[ $(progress_of "$file") == "$before" ]]; then
            idle=$((idle + 1))
        else
            idle=0
        fi
        if ((idle == 3)); then
            echo "run_batch: shard $shard ended with $code three times without a new result" >&2
            return $code
        fi
        echo "run_batch: shard $shard ended with $code; going on" >&2
    done
}

files=()
worst=0
for ((shard = 1; shard <= shards; shard++)); do
    file="$results.$shard-of-$shards"
    run_shard "$shard" "$file" "$@"
    code=$?
    ((code <= 1)) || exit $code
    ((code == 0)) || worst=1
    files+=("$file")
done

# Exit code 1 is also that of a run that had too little memory or no room for its results.
records=$(count_records)
done=$(cat "${files[@]}" | wc -l)
if ((done != records)); then
    echo "run_batch: $done of $records records have a result; nothing is brought together" >&2
    exit 1
fi

# Shard I has records I, I + SHARDS, I + 2 * SHARDS, ...: a line from each by turns is the order of the prompts.
paste -d '\n' "${files[@]}" | sed '/^$/d' >"$results.tmp" && cksum <"$results.tmp" >>"$results.made" &&
    mv "$results.tmp" "$results" || exit 2
exit $worst
