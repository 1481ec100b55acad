#!/usr/bin/env bash
# The main rows of `cargo run --example drift` with every step computed by llama.cpp: 8 decode workers on the virtual clock
# serve both workloads, as calibrated and in parts of 45, 30, 15 and 10 of 100, under the load balancers, the paper's band and
# `marginal_cost` as `--policy auto` runs it.
#
#   bash examples/paper/past.sh          some 70 minutes on a core after the build, with TRACES given
#   bash examples/paper/past.sh small    the same commands at the smallest setting
#
# A step takes what memory-bound.toml says for the experts it read, so the table is the same on every machine that computes the
# same picks. Requests come at the rate that keeps 16 on each worker while steps take what round robin's do.
# OUT=DIR changes where the results go; TRACES=DIR takes task.trace and language.trace from there; WORKLOADS=task serves
# that one only; ELDR=PROGRAM takes a built one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

setting="${1:-full}"
model=examples/data/tiny-moe-64x4.gguf
out="${OUT:-$TARGET/past}"
case "$setting" in
    full) workers=8 requests=1080 tokens=48 rate=89 seeds="1 2" taus=0.1,0.2,0.4 record_requests=400 record_tokens=128 ;;
    small) workers=2 requests=20 tokens=8 rate=130 seeds="1 2" taus=0.1,0.4 record_requests=32 record_tokens=8 ;;
    *) stop "the setting is full or small, not $setting" ;;
esac
workloads="${WORKLOADS:-task language}"

need_eldr
mkdir -p "$out"

# mixed WORKLOAD MIX SEED: prompts of the workload in these parts and an order of their own, none twice before all were drawn
mixed() {
    python3 - "examples/data/$1.serve.jsonl" "$out/$1.$2.$3.jsonl" "$2" "$3" "$requests" <<'PY'
import json, random, sys
source, target, mix, seed, requests = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
draw = random.Random(seed)
of_domain = {}
for line in map(json.loads, open(source, encoding="utf-8")):
    of_domain.setdefault(line["domain"], []).append(line)
domains = sorted(of_domain)
draw.shuffle(domains)
parts = [45, 30, 15, 10] if mix == "skewed" else [25, 25, 25, 25]
drawn = []
for domain, part in zip(domains, parts):
    n, lines = requests * part // 100, of_domain[domain]
    rounds = [draw.sample(lines, len(lines)) for _ in range(n // len(lines) + 1)]
    drawn += sum(rounds, [])[:n]
draw.shuffle(drawn)
with open(target, "w", encoding="utf-8") as file:
    for nth, line in enumerate(drawn):
        file.write(json.dumps(line | {"id": f"{nth}-{line['id']}"}, ensure_ascii=False) + "\n")
PY
}

for workload in $workloads; do
    trace="$out/$workload.trace"
    if [ -n "${TRACES:-}" ]; then
        cp "$TRACES/$workload.trace" "$trace"
    elif [ ! -f "$trace" ]; then
        "$eldr" record -m "$model" --prompts "examples/data/$workload.calibration.jsonl" --requests "$record_requests" \
            -n "$record_tokens" --threads 1 -o "$trace"
    fi
    calibration="$out/$workload.safetensors"
    "$eldr" calibrate --trace "$trace" --workers "$workers" --no-verdict --tau 0.1 -o "$calibration" > /dev/null
    for mix in matched skewed; do
        for seed in $seeds; do
            mixed "$workload" "$mix" "$seed"
            name="$workload.$mix.$seed"
            bench=("$eldr" bench -m "$model" --workload "$out/$name.jsonl" --threads 1 --calibration "$calibration"
                --charge examples/paper/memory-bound.toml --step-cost examples/paper/memory-bound.toml --rate "$rate"
                --prefill "$workers" --decode "$workers" --slots 48 --ctx 1024 --output-tokens "$tokens" --warmup 0.2 --seed "$seed")
            "${bench[@]}" --policies round_robin,least_loaded,random,power_of_two,marginal_cost --refit --rows "$out/$name.json" > /dev/null
            "${bench[@]}" --policies locality_band --sweep "tau=$taus" --rows "$out/$name.band.json" > /dev/null
        done
    done
done

# shellcheck disable=SC2086
python3 - "$out" "$workloads" $seeds <<'PY'
import json, sys
out, workloads, seeds = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
BALANCERS = ["round_robin", "random", "least_loaded", "power_of_two"]
for workload in workloads:
    for mix in ["matched", "skewed"]:
        rows = {}
        for seed in seeds:
            for part in ["", ".band"]:
                for row in json.load(open(f"{out}/{workload}.{mix}.{seed}{part}.json"))["rows"]:
                    s = row["setting"]
                    key = s["policy"] + (f" tau {s['tau']}" if part else "")
                    rows.setdefault(key, {})[seed] = row["measured"]
        mean = lambda key, what: sum(one[what] for one in rows[key].values()) / len(rows[key])
        best = {what: min(BALANCERS, key=lambda b: mean(b, what)) for what in ["tpot_p50_ms", "tpot_p99_ms"]}
        # Seed by seed, so that a mix is compared with itself.
        change = lambda key, what: sum(rows[key][s][what] / rows[best[what]][s][what] - 1 for s in seeds) / len(seeds)
        bands = sorted(key for key in rows if "tau" in key)
        print(f"\n{workload}, {mix}; best balancers: {best['tpot_p50_ms']} (p50), {best['tpot_p99_ms']} (p99)\n")
        print("| policy | experts a step | sequences a step | TPOT p50 / p99, ms | against the best balancer |")
        print("| --- | --- | --- | --- | --- |")
        for key in BALANCERS + bands + ["marginal_cost"]:
            p50, p99 = change(key, "tpot_p50_ms"), change(key, "tpot_p99_ms")
            print(f"| {key} | {mean(key, 'experts_per_step'):.1f} | {mean(key, 'batch'):.1f} | {mean(key, 'tpot_p50_ms'):.1f} / "
                  f"{mean(key, 'tpot_p99_ms'):.1f} | {100 * p50:+.1f} / {100 * p99:+.1f} % |")
PY
