#!/usr/bin/env bash
# The main job on the shipped model: calibrate, then serve the same requests under every routing policy and compare.
# Ends with a table and the path of a drawing of it.
#
# Needs git, a C++ compiler and Rust; installs the rest or says how. Under three minutes after the build on two cores.
# OUT=DIR changes where the results go, REQUESTS=N how many requests are served, PREFILL=N the prefill workers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

model=examples/data/tiny-moe-64x4.gguf
out="${OUT:-$TARGET/demo}"

need_build_tools
echo "== building (llama.cpp takes a few minutes the first time)"
cargo build --locked --release
eldr="$TARGET/release/eldr"
mkdir -p "$out"

# The paper's tau: choosing it, and a verdict, take more requests than a demo has time to record.
echo "== calibrating: which experts each request uses, and one centroid for each of 8 decode workers"
"$eldr" calibrate -m "$model" --prompts examples/data/task.calibration.jsonl --requests 128 --workers 8 \
    --tau 0.1 --no-verdict -o "$out/task.safetensors"

# One prefill worker keeps eight decode workers in company only while an answer takes much longer than a prompt. On a CPU
# a token of a prompt costs a third of a token of an answer, so the prompts are the short ones and the answers long.
prefill="${PREFILL:-1}"
echo "== serving the same requests under every policy, $prefill prefill and 8 decode workers"
"$eldr" bench -m "$model" --workload examples/data/task.serve.jsonl --calibration "$out/task.safetensors" \
    --prefill "$prefill" --decode 8 --policies all --clock virtual --threads 1 --flash-attn on --slots 24 --concurrency 96 \
    --max-prompt 48 --output-tokens 288 --requests "${REQUESTS:-64}" --warmup 0.3 \
    --json "$out/bench.json" --svg "$out/bench.svg"

cat <<'END'

This model is tiny: its weights stay in the CPU's caches, so a step's time follows its batch, and TPOT follows how evenly the
requests are spread. The reads column is what a model that waits for memory saves; `eldr inflate` makes one of this model.
END
echo "drawing: $out/bench.svg"
echo "numbers: $out/bench.json"
