#!/usr/bin/env bash
# How far the simulator is from the bench: the same requests, workers and load, once with every step computed and timed on
# the virtual clock, once simulated with the costs fitted here. Prints both and their difference for each pool.
#
#   bash examples/paper/validate.sh [MODEL]     about half an hour on quiet cores; SMALL=1 takes some minutes
#
# Greedy outputs, so that the recording and the bench have the same tokens, and so the same picks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

model="${1:-examples/data/tiny-moe-64x4.gguf}"
out="${OUT:-$TARGET/validate}"
workload=examples/data/task.serve.jsonl
if [ -n "${SMALL:-}" ]; then
    pools="2 4" per_worker=6 rounds=3 tokens=24 fit_requests=40
else
    pools="2 4 8 16" per_worker=12 rounds=4 tokens=48 fit_requests=160
fi
slots=$((per_worker * 2))

need_build_tools
cargo build --locked --release --quiet
eldr="$TARGET/release/eldr"
mkdir -p "$out"

# As many tokens for every request, in the recording and in the bench.
sed "s/\"max_tokens\": [0-9]*/\"max_tokens\": $tokens/" "$workload" > "$out/serve.jsonl"
workload="$out/serve.jsonl"

common=(-m "$model" --threads 1)
prompts=$(wc -l < "$workload")
[ -f "$out/serve.trace" ] || "$eldr" record "${common[@]}" --prompts "$workload" --requests "$prompts" -n "$tokens" --temperature 0 \
    -o "$out/serve.trace"
"$eldr" bench "${common[@]}" --workload "$workload" --slots "$slots" --requests "$fit_requests" \
    --temperature 0 --fit "$out/cost.toml"

for workers in $pools; do
    concurrency=$((workers * per_worker))
    requests=$((concurrency * rounds))
    prefill=$((workers * 4))
    "$eldr" bench "${common[@]}" --workload "$workload" --policies round_robin,least_loaded --decode "$workers" --prefill "$prefill" \
        --slots "$slots" --concurrency "$concurrency" --requests "$requests" --temperature 0 --warmup 0.3 \
        --rows "$out/bench.$workers.json" > /dev/null
    printf 'in_order = true\nwarmup = 0.3\nprefill = %s\n[[decode]]\nworkers = %s\nslots = %s\n' "$prefill" "$workers" "$slots" \
        > "$out/scenario.toml"
    "$eldr" simulate --trace "$out/serve.trace" --cost "$out/cost.toml" --scenario "$out/scenario.toml" --requests "$requests" \
        --concurrency "$concurrency" --policies round_robin,least_loaded -o "$out/simulate.$workers.json" > /dev/null
    python3 - "$out/bench.$workers.json" "$out/simulate.$workers.json" <<'PY'
import json, sys
bench, simulated = ({r["setting"]["policy"]: r for r in json.load(open(path))["rows"]} for path in sys.argv[1:])
for policy, row in bench.items():
    workers = row["setting"]["workers"]
    for name in ["tpot_mean_ms", "tpot_p50_ms", "experts_per_step", "batch"]:
        a, b = row["measured"][name], simulated[policy]["measured"][name]
        print(f"{workers:>2} workers {policy:13} {name:17} bench {a:8.3f} simulated {b:8.3f} {100 * (b / a - 1):+6.1f} %")
PY
done
