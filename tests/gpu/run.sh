#!/usr/bin/env bash
# Checks and measures one device, against the CPU: counts, hand-offs, what the tap costs, step time against distinct
# experts, policies with 4 to 16 workers, memory. Writes gpu.json and gpu.md; fails if a check does.
#
#   DEVICE=cuda:0 bash tests/gpu/run.sh          a GPU; any name that `eldr doctor` lists
#   DEVICE=cpu SIZE=small bash tests/gpu/run.sh  half a minute: that every part runs, and no number to quote
#
# ELDR and CHECK are the program and the bench `device`; without them both are built here, with FEATURES if given. Built
# elsewhere with `--features dynamic-backends`, they need only the ggml library of the device beside them or in the
# folder that they are run in (examples/devices). Others: OUT, a folder; MODEL, another model for the times than the
# shipped one inflated to INFLATE; PEER, a llama-batched-bench of the same llama.cpp, to compare decode speed with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

device="${DEVICE:-cuda:0}"
size="${SIZE:-full}"
out="${OUT:-$TARGET/gpu}"
case "$size" in
    small) inflate="${INFLATE:-}" pools="4" per_worker=4 rounds=2 tokens=16 recorded=40 fit_requests=24 fit_slots=4 n_speed=100 ;;
    full) inflate="${INFLATE:-8GiB}" pools="4 8 16" per_worker=16 rounds=3 tokens=64 recorded=400 fit_requests=192 fit_slots=64 n_speed=300 ;;
    *) stop "SIZE is small or full, not '$size'." ;;
esac

have python3 || stop "python3 is missing; install it and run this again."
if [ -z "${ELDR:-}" ] || [ -z "${CHECK:-}" ]; then
    need_build_tools
    cargo build --locked --release --quiet ${FEATURES:+--features "$FEATURES"} --bin eldr --bench device
    ELDR="$TARGET/release/eldr"
    CHECK=$(find "$TARGET/release/deps" -name 'device-*' -type f -perm -u+x -printf '%T@ %p\n' | sort -rn | head -n 1 | cut -d' ' -f2)
fi
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.jsonl "$out"/gpu.md "$out"/*.log "$out"/*.trace "$out"/*.safetensors

step() { echo "== $1, $SECONDS s" >&2; }

step "the machine"
"$ELDR" doctor --json --prefill "1@$device" --decode "4@$device" --plan > "$out/doctor.json" 2> "$out/doctor.log" ||
    stop "$(python3 -c 'import json, sys
broken = [f for f in json.load(open(sys.argv[1]))["findings"] if f["level"] == "broken"]
print(broken[0]["message"] + ": " + broken[0]["advice"])' "$out/doctor.json" 2> /dev/null || cat "$out/doctor.log")"

model="${MODEL:-}"
if [ -z "$model" ] && [ -n "$inflate" ]; then
    step "inflating the shipped model to $inflate"
    model="$out/inflated.gguf"
    [ -f "$model" ] || "$ELDR" inflate --size "$inflate" -o "$model" > /dev/null
fi
timed=()
[ -z "$model" ] || timed=(-m "$model")

# Picks are those of the timed model; an inflated one's are the shipped one's.
step "recording"
"$ELDR" record "${timed[@]}" --threads 1 --prefill "1@$device" --decode "1@$device" --prompts examples/data/task.calibration.jsonl \
    --requests "$recorded" -n "$tokens" -o "$out/task.trace" > /dev/null
for pool in $pools; do
    "$ELDR" calibrate --trace "$out/task.trace" --workers "$pool" --tau 0.1 -o "$out/task.$pool.safetensors" > /dev/null
done
calibration="$out/task.4.safetensors"
if [ -n "$model" ]; then
    # The checks route the shipped model's requests.
    step "recording with the shipped model"
    calibration="$out/shipped.4.safetensors"
    "$ELDR" calibrate --prompts examples/data/task.calibration.jsonl --requests "$recorded" --max-tokens "$tokens" --workers 4 \
        --threads 1 --tau 0.1 --prefill "1@$device" --decode "1@$device" -o "$calibration" > /dev/null
fi

step "checks"
"$CHECK" "$device" "$size" "$model" "$calibration" > "$out/device.json"

workload=(--workload examples/data/task.serve.jsonl --output-tokens "$tokens")
for pool in $pools; do
    step "policies with $pool workers"
    "$ELDR" bench "${timed[@]}" "${workload[@]}" --threads 1 --calibration "$out/task.$pool.safetensors" --prefill "$((pool * 2))@$device" \
        --decode "$pool@$device" --slots "$((per_worker * 2))" --concurrency "$((pool * per_worker))" \
        --requests "$((pool * per_worker * rounds))" --warmup 0.34 \
        --policies round_robin,least_loaded,power_of_two,random,locality_band,marginal_cost --json "$out/policies.$pool.json" > /dev/null
done

step "what a step costs"
"$ELDR" bench "${timed[@]}" "${workload[@]}" --threads 1 --prefill "1@$device" --decode "1@$device" --slots "$fit_slots" \
    --requests "$fit_requests" --fit "$out/cost.toml" --rows "$out/cost.json" > /dev/null

# The engine at work, beside the bare steps of the checks and, where it is at hand, llama.cpp's own program.
# Short prompts and many random tokens, so that the batch is full nearly all the time.
step "decode speed"
for i in $(seq 16); do
    printf '{"id":"p%s","prompt":"' "$i"
    for j in $(seq 12); do printf '%s ' "$(((i * 7919 + j * 104729) % 9973))"; done
    printf '"}\n'
done > "$out/short.jsonl"
for batch in 8 16; do
    "$ELDR" bench "${timed[@]}" --workload "$out/short.jsonl" --output-tokens "$n_speed" --clock real --threads 1 \
        --prefill "1@$device" --decode "1@$device" --slots "$batch" --requests "$batch" --policies round_robin --temperature 1000 \
        --warmup 0 --no-exact --no-count --flash-attn on --json "$out/speed.$batch.json" > /dev/null
    [ -n "${PEER:-}" ] || continue
    layers=99 named=()
    if [ "$device" = cpu ]; then layers=0; else named=(-dev "$(tr -d : <<< "${device^^}")"); fi
    LD_LIBRARY_PATH="$(dirname "$PEER"):${LD_LIBRARY_PATH:-}" "$PEER" -m "${model:-examples/data/tiny-moe-64x4.gguf}" -npp 32 -ntg "$n_speed" \
        -npl "$batch" -t 1 -tb 1 -fa on -no-kvu -ngl "$layers" "${named[@]}" -c $((1024 * batch)) --output-format jsonl 2> /dev/null |
        grep '^{' > "$out/peer.$batch.json" || stop "$PEER says nothing about $device: does it have that device?"
done

rm -f "$out/inflated.gguf"
python3 tests/gpu/page.py "$out" "$device" "$size"
