#!/bin/sh
# Serves the conversations of make_chats.py with the prefix cache off and on, under round robin and by marginal cost, and
# prints what `eldr bench` measures of each: TTFT, TPOT, distinct experts, and which prompt tokens were there. Requests come
# in a closed loop, CONCURRENCY at a time, with answers far longer to decode than prompts are to prefill, so that the mean
# decode batches with and without the cache are alike; they are compared, and the script fails where they differ by more
# than a tenth. Times are this machine's: leave it alone meanwhile. `cargo bench --bench chats` is the same question
# without a clock.
#
# Usage: bench_chats.sh ELDR [task|language] [REQUESTS]   (one thread, virtual clock; 96 requests without a number)
# CONCURRENCY (24) and OUTPUT (96 tokens) set the batch.
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
        --calibration "$work/fit.safetensors" --clock virtual --concurrency "${CONCURRENCY:-24}" --prefill 8 --decode 4 \
        --slots 16 --chunk 128 --output-tokens "${OUTPUT:-96}" --threads 1 --prefix-cache "$cache" \
        --json "$work/$cache.json"
done
python3 - "$work/off.json" "$work/on.json" <<'PYTHON'
import json
import sys

off, on = ([run["batch"]["mean"] for run in json.load(open(path, encoding="utf-8"))["runs"]] for path in sys.argv[1:])
for a, b in zip(off, on):
    print(f"mean decode batch {a:.2f} without the cache, {b:.2f} with it: {100 * (b - a) / a:+.1f} %")
sys.exit("the batches differ by more than 10 %: raise OUTPUT" if any(abs(b - a) > 0.1 * a for a, b in zip(off, on)) else 0)
PYTHON
