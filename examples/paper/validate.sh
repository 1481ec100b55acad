#!/usr/bin/env bash
# How far the simulator is from the bench: the same requests in the same order, workers and load, once with every step
# computed by llama.cpp on the virtual clock, once simulated from a recording of them. Ends with an error where a measure of a
# pool differs by more than 5 %.
#
#   bash examples/paper/validate.sh [MODEL]     2, 4, 8 and 16 workers: some 5 minutes on two cores after the build
#   SMALL=1 bash examples/paper/validate.sh     2 and 4 workers, half a minute
#
# Steps take what they took in one bench of this machine (`bench --cost`), in the bench (`--charge`) as in the simulation. Were
# the bench's steps timed too, its own two runs would differ by more than 5 %, since a machine's speed drifts; TIMED=1 shows
# that: each policy on the largest pool once more, timed, beside a simulation with what its own steps took, judged by nobody.
# OUT=DIR changes where the files go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

model="${1:-examples/data/tiny-moe-64x4.gguf}"
out="${OUT:-$TARGET/validate}"
if [ -n "${SMALL:-}" ]; then
    pools="2 4" per_worker=4 rounds=3 tokens=12 prompts=48
else
    pools="2 4 8 16" per_worker=6 rounds=4 tokens=48 prompts=384
fi

need_build_tools
cargo build --locked --release --quiet
eldr="$TARGET/release/eldr"
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
policies=round_robin,least_loaded,locality_band,marginal_cost
rm -f "$out/serve.trace"
"$eldr" record "${common[@]}" --prompts "$workload" --requests "$prompts" -n "$tokens" --temperature 0 -o "$out/serve.trace"

"$eldr" bench "${common[@]}" --workload "$workload" --policies round_robin --decode 4 --prefill 16 --slots "$((per_worker * 2))" \
    --concurrency "$((4 * per_worker))" --requests "$prompts" --temperature 0 --cost "$out/cost.toml" > /dev/null
echo "steps: $(sed -n 's/^source = "\(.*\)"$/\1/p' "$out/cost.toml")"

# pair NAME POLICIES COST BENCH-OPTIONS: a bench, and its simulation where steps take what COST says.
pair() {
    local name=$1 policies=$2 cost=$3
    shift 3
    "$eldr" bench "${common[@]}" --workload "$workload" --policies "$policies" --calibration "$calibration" --decode "$workers" \
        --prefill "$prefill" --slots "$slots" --concurrency "$concurrency" --requests "$requests" --temperature 0 \
        --warmup 0.3 "$@" --rows "$out/$name.bench.json" > /dev/null
    "$eldr" simulate --trace "$out/serve.trace" --cost "$cost" --scenario "$out/scenario.toml" --calibration "$calibration" \
        --requests "$requests" --concurrency "$concurrency" --policies "$policies" -o "$out/$name.simulate.json" > /dev/null
}

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
    pair "$workers" "$policies" "$out/cost.toml" --charge "$out/cost.toml"
done
timed=""
if [ -n "${TIMED:-}" ]; then
    for policy in ${policies//,/ }; do
        pair "timed-$policy" "$policy" "$out/own.toml" --cost "$out/own.toml"
        timed="$timed timed-$policy"
    done
fi

# shellcheck disable=SC2086
python3 - "$out" $pools $timed <<'PY'
import json, sys
out, names = sys.argv[1], sys.argv[2:]
measured = lambda name: {row["setting"]["policy"]: row["measured"] for row in json.load(open(f"{out}/{name}.json"))["rows"]}
wrong, n = [], 0
print(f"{'workers':>7} {'policy':13} {'':17} {'bench':>8} {'simulated':>9}")
for name in names:
    bench, simulated = measured(f"{name}.bench"), measured(f"{name}.simulate")
    is_judged = not name.startswith("timed")
    for policy in bench:
        for what in ["batch", "experts_per_step", "tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms"]:
            a, b = bench[policy][what], simulated[policy][what]
            n += is_judged
            is_off = is_judged and abs(b / a - 1) > 0.05
            print(f"{name.split('-')[0]:>7} {policy:13} {what:17} {a:8.3f} {b:9.3f} {100 * (b / a - 1):+6.1f} %{' !' if is_off else ''}")
            if is_off:
                wrong.append(f"{what} of {policy} with {name} workers")
if wrong:
    sys.exit(f"the simulator is more than 5 % off the bench in {len(wrong)} of {n} measures: {', '.join(wrong)}")
print(f"all {n} measures judged agree within 5 %")
PY
