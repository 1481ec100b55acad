#!/usr/bin/env bash
# Experts in host memory: what a decode step reads from there under four policies, how fast, and that greedy outputs are the
# same, whichever policy serves and wherever the rest of the model is.
#
#   bash examples/devices/cpu_moe.sh          some 8 minutes on two quiet cores after the build
#   bash examples/devices/cpu_moe.sh small    the same commands at the smallest setting, half a minute
#
# The shipped model with its experts inflated to 1 GiB (zero rows: the same outputs and picks) is served by 8 workers, every
# step computed and timed on the virtual clock: first all of it on the CPU, then with everything but the experts on DEVICE.
# Without DEVICE that is one behind RPC on loopback, started here: another process with memory of its own, which computes the
# attention, while the experts are read by this one's processors.
#
# DEVICE=cuda:0 takes a GPU, or any other device. A step of GGML_OP_OFFLOAD_MIN_BATCH (32) tokens or more copies its distinct
# experts there and computes them there; a smaller one computes them on the host. OUT=DIR changes where the results go; ELDR
# names a built program, MODEL an inflated model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

case "${1:-full}" in
    full) size=1GiB workers=8 slots=24 per_worker=12 requests=130 tokens=16 recorded=400 fit_tokens=128 ;;
    small) size=48MiB workers=2 slots=4 per_worker=2 requests=12 tokens=6 recorded=32 fit_tokens=8 ;;
    *) stop "the setting is full or small, not ${1:-}" ;;
esac
out="${OUT:-$TARGET/cpu_moe}"
mkdir -p "$out"
have python3 || stop "python3 is missing; install it and run this again."
need_eldr
if [ -z "${MODEL:-}" ]; then
    MODEL="$out/inflated.gguf"
    [ -f "$MODEL" ] || "$eldr" inflate --size "$size" -o "$MODEL" > /dev/null
fi
calibration="${CALIBRATION:-$out/$workers.safetensors}"
[ -f "$calibration" ] ||
    "$eldr" calibrate --prompts examples/data/task.calibration.jsonl --requests "$recorded" --max-tokens "$fit_tokens" --threads 1 \
        --workers "$workers" --tau 0.1 --no-verdict -o "$calibration" > /dev/null

device="${DEVICE:-}"
if [ -z "$device" ]; then
    "$eldr" rpc-server --listen 127.0.0.1:0 --device cpu --threads 1 --json > "$out/server.json" &
    server=$!
    trap 'kill "$server" 2> /dev/null || true' EXIT
    for _ in $(seq 100); do
        [ ! -s "$out/server.json" ] || break
        sleep 0.1
    done
    device="rpc:$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["listening"])' "$out/server.json")"
fi

# bench NAME DEVICE [OPTION..]
bench() {
    "$eldr" bench -m "$MODEL" --workload examples/data/task.serve.jsonl --calibration "$calibration" --threads 1 --flash-attn off \
        --temperature 0 --max-prompt 120 --prefill "$((workers * 6))@$2" --decode "$workers@$2" --slots "$slots" \
        --concurrency "$((workers * per_worker))" --requests "$requests" --output-tokens "$tokens" --warmup 0.4 \
        --policies round_robin,least_loaded,locality_band,marginal_cost --json "$out/$1.json" "${@:3}" > /dev/null
}
bench cpu cpu
bench device "$device" --cpu-moe

python3 - "$out" "$device" "${DEVICE:+other}" <<'PY'
import json, sys
out, device = sys.argv[1:3]
same_kernels = not sys.argv[3]  # Only then is anything promised to the bit.
BALANCERS = ["round_robin", "least_loaded"]
reports = {name: json.load(open(f"{out}/{name}.json")) for name in ["cpu", "device"]}
places = {"cpu": "everything on the CPU", "device": f"experts in host memory, the rest on {device.split(':')[0]}"}
wrong = []
for name, report in reports.items():
    runs, limits = {run["policy"]: run for run in report["runs"]}, {limit["policy"]: limit for limit in report.get("limits") or []}
    base = min(runs[balancer]["tpot_ms"]["p50"] for balancer in BALANCERS)
    print(f"\n{places[name]}; {report['machine']['cpu']}, {report['decode']} workers\n")
    print("| policy | sequences a step | experts a layer | MiB of experts a step | GB/s read | TPOT p50 / p99, ms | p50 against the best balancer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for policy, run in runs.items():
        tpot, rate = run["tpot_ms"], limits.get(policy, {}).get("gb_per_s")
        print(f"| {policy} | {run['batch']['mean']:.1f} | {run['experts_distinct']['mean']:.1f} | {run['expert_bytes_step'] / 2**20:.1f} | "
              f"{f'{rate:.2f}' if rate else ''} | {tpot['p50']:.1f} / {tpot['p99']:.1f} | {100 * (tpot['p50'] / base - 1):+.1f} % |")
        if run["failed"]:
            wrong.append(f"{run['failed']} requests failed under {policy}, {places[name]}")
    equal = len({run["tokens_sha256"] for run in runs.values()}) == 1
    print(f"\nGreedy outputs: {'the same' if equal else 'not the same'} under all policies.")
    if not equal and (name == "cpu" or same_kernels):
        wrong.append(f"greedy outputs depend on the policy: {places[name]}")
equal = len({report["runs"][0]["tokens_sha256"] for report in reports.values()}) == 1
print(f"Those of the two settings are {'' if equal else 'not '}the same.")
if not equal and same_kernels:
    wrong.append("greedy outputs depend on where the experts are")
if wrong:
    sys.exit("; ".join(wrong))
PY
