#!/usr/bin/env bash
# How far the simulator is from the bench: the same requests in the same order, workers and load, once with every step
# computed and timed on the virtual clock, once simulated from a recording of them. Ends with an error where a measure of a
# pool differs by more than 5 %.
#
#   bash examples/paper/validate.sh [MODEL]     2, 4, 8 and 16 workers: some 5 minutes on two quiet cores after the build
#   SMALL=1 bash examples/paper/validate.sh     2 and 4 workers, half a minute: too few requests for 5 %, so only the experts
#                                               that a step reads for each of its sequences are judged, by 25 %: times and
#                                               batches are other ones where something else runs
#
# What steps take is fitted to each bench's own steps (`bench --cost`): a machine's speed drifts by more than 5 % between two
# runs, which would say nothing about the simulator. OUT=DIR changes where the files go, ELDR=PROGRAM
# takes a built one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

model="${1:-examples/data/tiny-moe-64x4.gguf}"
out="${OUT:-$TARGET/validate}"
if [ -n "${SMALL:-}" ]; then
    pools="2 4" per_worker=4 rounds=3 tokens=12 prompts=48 limit=0.25 judged=experts_a_sequence
else
    pools="2 4 8 16" per_worker=8 rounds=3 tokens=32 prompts=384 limit=0.05 judged='batch experts_per_step tpot_mean_ms tpot_p50_ms'
fi

need_eldr
mkdir -p "$out"

# The shorter prompts; as many tokens for every request, in the recording and in the bench. Greedy, so that both have the
# same tokens and the same picks.
workload="$out/serve.jsonl"
python3 - examples/data/task.serve.jsonl "$workload" "$prompts" "$tokens" <<'PY'
import json, sys
source, target, prompts, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lines = [json.loads(line) for line in open(source, encoding="utf-8")]
longest = sorted(len(line["prompt"]) for line in lines)[min(prompts, len(lines)) - 1]
short = [line for line in lines if len(line["prompt"]) <= longest][:prompts]
with open(target, "w", encoding="utf-8") as file:
    for line in short:
        file.write(json.dumps({**line, "max_tokens": tokens}, ensure_ascii=False) + "\n")
PY

common=(-m "$model" --threads 1)
rm -f "$out/serve.trace"
"$eldr" record "${common[@]}" --prompts "$workload" --requests "$prompts" -n "$tokens" --temperature 0 -o "$out/serve.trace"

for workers in $pools; do
    concurrency=$((workers * per_worker))
    slots=$((per_worker * 2))
    prefill=$((workers * 4))
    # Enough requests for a steady state, and none twice, since a copy in the system would read its own experts.
    requests=$((concurrency * rounds < 96 ? 96 : concurrency * rounds))
    requests=$((requests > prompts ? prompts : requests))
    calibration="$out/$workers.safetensors"
    "$eldr" calibrate --trace "$out/serve.trace" --workers "$workers" --no-verdict --tau 0.1 -o "$calibration" > /dev/null
    printf 'in_order = true\nwarmup = 0.3\nprefill = %s\n[[decode]]\nworkers = %s\nslots = %s\n' "$prefill" "$workers" "$slots" \
        > "$out/scenario.toml"
    for policy in round_robin least_loaded locality_band; do
        "$eldr" bench "${common[@]}" --workload "$workload" --policies "$policy" --calibration "$calibration" --decode "$workers" \
            --prefill "$prefill" --slots "$slots" --concurrency "$concurrency" --requests "$requests" --temperature 0 \
            --warmup 0.3 --cost "$out/cost.toml" --rows "$out/bench.$workers.$policy.json" > /dev/null
        "$eldr" simulate --trace "$out/serve.trace" --cost "$out/cost.toml" --scenario "$out/scenario.toml" \
            --calibration "$calibration" --requests "$requests" --concurrency "$concurrency" --policies "$policy" \
            -o "$out/simulate.$workers.$policy.json" > /dev/null
    done
done

# shellcheck disable=SC2086
python3 - "$out" "$limit" "$pools" $judged <<'PY'
import json, sys
out, limit, pools, judged = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(), sys.argv[4:]
def measured(name):
    row = json.load(open(f"{out}/{name}.json"))["rows"][0]["measured"]
    return {**row, "experts_a_sequence": row["experts_per_step"] / row["batch"]}

wrong, n = [], 0
print(f"{'workers':>7} {'policy':13} {'':18} {'bench':>8} {'simulated':>9}")
for workers in pools:
    for policy in ["round_robin", "least_loaded", "locality_band"]:
        bench, simulated = measured(f"bench.{workers}.{policy}"), measured(f"simulate.{workers}.{policy}")
        for name in ["batch", "experts_per_step", "experts_a_sequence", "tpot_mean_ms", "tpot_p50_ms"]:
            a, b = bench[name], simulated[name]
            n += name in judged
            is_off = name in judged and abs(b / a - 1) > limit
            print(f"{workers:>7} {policy:13} {name:18} {a:8.3f} {b:9.3f} {100 * (b / a - 1):+6.1f} %{' !' if is_off else ''}")
            if is_off:
                wrong.append(f"{name} of {policy} with {workers} workers")
if wrong:
    sys.exit(f"the simulator is more than {limit:.0%} off the bench in {len(wrong)} of {n} measures: {', '.join(wrong)}")
print(f"all {n} measures judged agree within {limit:.0%}")
PY
