#!/bin/sh
# Serves the conversations of make_chats.py with the prefix cache off and on, under round robin and by marginal cost, and
# prints what `eldr bench` reports of each: TTFT, TPOT, distinct experts, and which prompt tokens were there.
#
# Usage: bench_chats.sh ELDR [task|language] [REQUESTS]   (one thread, virtual clock; 96 requests without a number)
set -eu
eldr=$1
workload=${2:-task}
requests=${3:-96}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 "$here/make_chats.py" "$here/$workload.serve.jsonl" > "$work/chats.jsonl"
head -n "${CALIBRATE:-120}" "$here/$workload.calibration.jsonl" > "$work/calibration.jsonl"
"$eldr" calibrate --prompts "$work/calibration.jsonl" --max-tokens 16 --workers 4 --no-verdict --tau 0.1 --threads 1 \
    --output "$work/fit.safetensors" > "$work/calibrate.txt"
for cache in off on; do
    echo "== $workload, prefix cache $cache"
    "$eldr" bench --workload "$work/chats.jsonl" --requests "$requests" --policies round_robin,marginal_cost \
        --calibration "$work/fit.safetensors" --clock virtual --concurrency 32 --prefill 4 --decode 4 --slots 16 --chunk 128 --output-tokens "${OUTPUT:-128}" \
        --threads 1 --prefix-cache "$cache"
done
