#!/bin/sh
# Serves the conversations of make_chats.py with the prefix cache off and on, under round robin and by marginal cost, and
# prints what `eldr bench` reports of each: TTFT, TPOT, distinct experts, and which prompt tokens were there. Requests arrive
# at random at a given rate, the same with and without the cache, so that the batches, and with them TPOT, can be compared.
#
# Usage: bench_chats.sh ELDR [task|language] [REQUESTS]   (one thread, virtual clock; 96 requests without a number)
# RATE requests a second and OUTPUT tokens each set the batch: about RATE x OUTPUT x TPOT / 4 sequences a decode worker.
# ANSWERS=1 lets prompts and answers come back from the decode workers, too, which only costs here: these conversations go on
# with answers of their own.
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
bench() {
    echo "== $workload, prefix cache $*"
    "$eldr" bench --workload "$work/chats.jsonl" --requests "$requests" --policies round_robin,marginal_cost \
        --calibration "$work/fit.safetensors" --clock virtual --rate "${RATE:-60}" --prefill 8 --decode 4 --slots 16 \
        --chunk 128 --output-tokens "${OUTPUT:-96}" --threads 1 --prefix-cache "$@"
}
bench off
bench on
if [ "${ANSWERS:-0}" = 1 ]; then
    bench on --no-exact
    bench on --no-exact --cache-answers
fi
