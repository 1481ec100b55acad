#!/usr/bin/env bash
# The main result where memory is what limits a step: the shipped model with its experts inflated to 1 GiB (zero rows: the
# same outputs and picks), 8 and 16 decode workers, both workloads; and what a router that knows every pick in advance gains.
#
#   bash examples/paper/main_result.sh          some 12 minutes on two quiet cores after the build, with TRACES given;
#                                               recording both workloads takes some 15 more
#   bash examples/paper/main_result.sh small    the same commands at the smallest setting, under a minute
#
# First `bench --fit` measures what steps of the inflated model take here. With that cost the recorded picks are served by 8
# and 16 workers under every policy, and once more by policies that are told the picks of the answers ("clairvoyant"). Then,
# unless REAL=0, the inflated model itself serves both workloads on 8 workers on the virtual clock, without clairvoyance.
#
# OUT=DIR changes where the results go; TRACES=DIR takes task.trace and language.trace from there; COST=FILE takes a cost;
# ELDR=PROGRAM takes a built one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

setting="${1:-full}"
model=examples/data/tiny-moe-64x4.gguf
out="${OUT:-$TARGET/main_result}"
case "$setting" in
    full)
        size=1GiB slots=24 per_worker=12 pools="8 16" requests=3000 seeds=5 fit_requests=72 record_requests=400 record_tokens=128
        real_workers=8 real_requests=130 real_tokens=32
        ;;
    small)
        size=48MiB slots=4 per_worker=2 pools="2 4" requests=200 seeds=2 fit_requests=12 record_requests=32 record_tokens=8
        real_workers=2 real_requests=12 real_tokens=6
        ;;
    *) stop "the setting is full or small, not $setting" ;;
esac

need_eldr
mkdir -p "$out"
balancers=round_robin,random,least_loaded,power_of_two

real="${REAL:-1}"
if [ -z "${COST:-}" ] || [ "$real" = 1 ]; then
    "$eldr" inflate -m "$model" --size "$size" --force -o "$out/inflated.gguf"
fi
cost="${COST:-$out/cost.toml}"
if [ -z "${COST:-}" ]; then
    "$eldr" bench -m "$out/inflated.gguf" --workload examples/data/task.serve.jsonl --threads 1 --slots "$slots" --max-prompt 160 \
        --requests "$fit_requests" --output-tokens 32 --fit "$cost" --rows "$out/fit.json"
fi

for workload in task language; do
    trace="$out/$workload.trace"
    if [ -n "${TRACES:-}" ]; then
        cp "$TRACES/$workload.trace" "$trace"
    elif [ ! -f "$trace" ]; then
        "$eldr" record -m "$model" --prompts "examples/data/$workload.calibration.jsonl" --requests "$record_requests" \
            -n "$record_tokens" --threads 1 -o "$trace"
    fi
    for workers in $pools; do
        # The width of the band as `eldr calibrate` chooses it for so many workers.
        choose=(--tau auto)
        [ "$setting" = full ] || choose=(--no-verdict --tau 0.3)
        "$eldr" calibrate --trace "$trace" --workers "$workers" "${choose[@]}" -o "$out/$workload.$workers.safetensors" > /dev/null
        tau=$("$eldr" inspect --calibration "$out/$workload.$workers.safetensors" --json |
            python3 -c 'import json, sys; told = json.load(sys.stdin); print(round(told.get("calibration", told)["tau"], 4))')
        # As many prefill workers as a CPU needs to keep the batches full.
        echo "prefill = $((workers * 6))" > "$out/scenario.toml"
        simulate=("$eldr" simulate --trace "$trace" --scenario "$out/scenario.toml" --cost "$cost" --workers "$workers" --slots "$slots"
            --concurrency "$((workers * per_worker))" --requests "$requests" --seeds "$seeds" --json)
        "${simulate[@]}" --policies "$balancers,domain,locality_band,marginal_cost" --tau "0.1,$tau" --clairvoyant \
            -o "$out/$workload.$workers.json" > /dev/null
        "${simulate[@]}" --policies marginal_cost --refit -o "$out/$workload.$workers.refit.json" > /dev/null
    done
done

# shellcheck disable=SC2086
python3 - "$out" $pools <<'PY'
import json, sys
out, pools = sys.argv[1], sys.argv[2:]
BALANCERS = ["round_robin", "random", "least_loaded", "power_of_two"]
for workload in ["task", "language"]:
    for workers in pools:
        samples = {}
        for name in [f"{workload}.{workers}", f"{workload}.{workers}.refit"]:
            for row in json.load(open(f"{out}/{name}.json"))["rows"]:
                s, m = row["setting"], row["measured"]
                key = s["policy"] + (f" tau {s['tau']}" if "tau" in s else "")
                key += ", clairvoyant" if s.get("clairvoyant") else ", refitted (auto)" if s.get("refit") else ""
                samples.setdefault(key, {}).setdefault(s["seed"], m)
        mean = lambda key, what: sum(m[what] for m in samples[key].values()) / len(samples[key])
        best = {what: min(BALANCERS, key=lambda b: mean(b, what)) for what in ["tpot_p50_ms", "tpot_p99_ms"]}
        change = lambda key, what: mean(key, what) / mean(best[what], what) - 1
        told = [key for key in samples if key.endswith("clairvoyant")]
        bound = min(change(key, "tpot_p50_ms") for key in told)
        print(f"\n{workload}, {workers} workers; best balancers: {best['tpot_p50_ms']} (p50), {best['tpot_p99_ms']} (p99)\n")
        print("| policy | experts a step | sequences a step | TPOT p50 / p99, ms | against the best balancer | of the clairvoyant p50 |")
        print("| --- | --- | --- | --- | --- | --- |")
        for key in samples:
            p50, p99 = change(key, "tpot_p50_ms"), change(key, "tpot_p99_ms")
            share = f"{100 * p50 / bound:.0f} %" if bound < 0 and key not in BALANCERS else ""
            print(f"| {key} | {mean(key, 'experts_per_step'):.1f} | {mean(key, 'batch'):.1f} | {mean(key, 'tpot_p50_ms'):.1f} / "
                  f"{mean(key, 'tpot_p99_ms'):.1f} | {100 * p50:+.1f} / {100 * p99:+.1f} % | {share} |")
PY

[ "$real" = 1 ] || exit 0
for workload in task language; do
    printf '\n== %s, %s workers, every step of the inflated model computed and timed\n' "$workload" "$real_workers"
    "$eldr" bench -m "$out/inflated.gguf" --workload "examples/data/$workload.serve.jsonl" --threads 1 --max-prompt 120 \
        --calibration "$out/$workload.$real_workers.safetensors" --prefill "$((real_workers * 6))" --decode "$real_workers" \
        --slots "$slots" --concurrency "$((real_workers * per_worker))" --requests "$real_requests" --output-tokens "$real_tokens" \
        --warmup 0.4 --step-cost "$cost" --policies round_robin,least_loaded,locality_band,marginal_cost \
        --rows "$out/$workload.real.json" > /dev/null
    "$eldr" report "$out/$workload.real.json"
done
