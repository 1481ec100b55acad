#!/usr/bin/env bash
# The paper's figures on the shipped model, one command each; README.md here tells what each printed.
#
#   bash examples/paper/run.sh          every figure: about an hour on two quiet cores, most of it recording and fitting
#   bash examples/paper/run.sh small    the same commands at the smallest setting, under a minute after the build
#
# OUT=DIR changes where the results go; TRACES=DIR takes task.trace and language.trace from there instead of recording;
# ELDR=PROGRAM takes a built one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

setting="${1:-full}"
model=examples/data/tiny-moe-64x4.gguf
out="${OUT:-$TARGET/paper}"
case "$setting" in
    full) prompts=400 tokens=128 requests=4000 seeds=5 rates=20,30,40,50,60 pools=8,16,24 size=1GiB slots=32 fit_requests=200 ;;
    small) prompts=64 tokens=12 requests=300 seeds=2 rates=20,40 pools=4,8 size=48MiB slots=4 fit_requests=24 ;;
    *) stop "the setting is full or small, not $setting" ;;
esac

need_eldr
mkdir -p "$out"

figure() { printf '\n== %s\n' "$1"; }

# simulate WORKLOAD NAME OPTION..: rows to $out/WORKLOAD.NAME.json, the table to standard output
simulate() {
    local workload=$1 name=$2
    shift 2
    "$eldr" simulate --trace "$out/$workload.trace" --cost "$cost" -o "$out/$workload.$name.json" "$@"
}

for workload in task language; do
    if [ -n "${TRACES:-}" ]; then
        cp "$TRACES/$workload.trace" "$out/$workload.trace"
    else
        figure "recording $workload"
        "$eldr" record -m "$model" --prompts "examples/data/$workload.calibration.jsonl" --requests "$prompts" -n "$tokens" \
            --threads 1 --gates -o "$out/$workload.trace"
    fi
    figure "domain deviation, prefill and decode, same and mixed domains, transforms, layers, tau: $workload"
    "$eldr" calibrate --trace "$out/$workload.trace" --workers 4 --no-verdict="$([ "$setting" = small ] && echo true || echo false)" \
        -o "$out/$workload.safetensors" --report "$out/$workload"
done

figure "latency against active experts: decode steps of every batch size, of mixed and of like requests"
"$eldr" inflate -m "$model" --size "$size" --force -o "$out/inflated.gguf"
"$eldr" bench -m "$out/inflated.gguf" --workload examples/data/task.serve.jsonl --threads 1 --slots "$slots" \
    --requests "$fit_requests" --output-tokens "$tokens" --max-prompt 200 --fit "$out/cost.toml" --rows "$out/batch.json"

# The results below do not depend on this machine; COST=FILE takes measured costs, such as the ones just fitted.
cost="${COST:-examples/paper/memory-bound.toml}"
balancers=round_robin,random,least_loaded,power_of_two
all=$balancers,domain,locality_band,marginal_cost

for workload in task language; do
    figure "TPOT and TTFT against rate: $workload"
    simulate "$workload" rate --workers 8 --rate "$rates" --requests "$requests" --seeds "$seeds" --policies "$all" --clairvoyant
    figure "active experts by batch: $workload"
    simulate "$workload" batch --workers 8 --concurrency 32,64,128 --requests "$requests" --policies round_robin,locality_band
    figure "tau: $workload"
    simulate "$workload" tau --workers 8 --concurrency 128 --requests "$requests" --seeds "$seeds" --tau 0,0.05,0.1,0.2,0.5,2 \
        --policies least_loaded,locality_band
    figure "balance: $workload"
    simulate "$workload" balance --workers 8 --concurrency 128 --requests "$requests" --seeds "$seeds" \
        --policies "$balancers,locality_band" --unbalanced
    figure "pool scaling: $workload"
    simulate "$workload" pool --workers "$pools" --slots 16 --requests "$requests" --policies "$all"
    figure "expert placement over 4 ranks: $workload"
    simulate "$workload" place --workers 4 --concurrency 64 --requests "$requests" --policies round_robin,locality_band \
        --place 4 --placement "$out/$workload.placement.json"
done

fewer=()
[ "$setting" = full ] || fewer=(--requests "$requests")
figure "prefix cache"
simulate task prefix --scenario examples/paper/scenarios/prefix.toml "${fewer[@]}" --policies least_loaded,locality_band
for scenario in failure diurnal bursts unequal; do
    figure "scenario: $scenario"
    simulate task "$scenario" --scenario "examples/paper/scenarios/$scenario.toml" "${fewer[@]}" --policies "$balancers,locality_band,marginal_cost"
done
figure "scenario: skewed"
simulate language skewed --scenario examples/paper/scenarios/skewed.toml "${fewer[@]}" --policies "$balancers,locality_band,marginal_cost"

if [ "$setting" = full ]; then
    figure "overheads: a decision, a signature, the tap"
    cargo bench --locked --bench route
    cargo bench --locked --bench calibrate -- signature
    cargo bench --locked --bench tap
    figure "placement of 128 experts in each of 94 layers"
    cargo bench --locked --bench placement
fi
figure "growth of costs"
small=()
[ "$setting" = full ] || small=(--small)
cargo bench --locked --bench growth -- "${small[@]}" -o "$out/growth.json" --svg "$out/growth.svg"

figure "report"
"$eldr" report "$out"/task.rate.json "$out"/task.pool.json -o "$out/report.md" --html "$out/report.html" --svg "$out/report.svg"
echo "drawn: $out/report.html"
