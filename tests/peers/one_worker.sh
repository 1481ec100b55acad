#!/usr/bin/env bash
# One `eldr serve` with one decode worker against one llama-server on the same cores: throughput, TTFT, TPOT, processor's time and
# memory at 1, 8, 16 and 32 clients, as ratios, interleaved in one run.
#
#   bash tests/peers/one_worker.sh PATH/TO/llama-server [MODEL]
#
# Both servers are held to CORES (0) and compute with THREADS (1) threads; the client has the machine's other cores. Both have
# SLOTS (32) sequences of 1024 tokens, flash attention as FLASH says (off), no prefix cache and the same requests, of examples/data/task.serve.jsonl,
# 32 to 96 tokens each. CLIENTS ("1 8 16 32"), ROUNDS (5) and SCALE (1): see side_by_side.py. The program comes as
# tests/peers/batched_bench.sh tells; run it on a quiet machine. ELDR_ARGS and PEER_ARGS are more options of the two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh
# shellcheck source=tests/peers/servers.sh
. tests/peers/servers.sh

slots="${SLOTS:-32}"
threads="${THREADS:-1}"
by=(taskset -c "${CORES:-0}")
read -r -a our_args <<<"${ELDR_ARGS:-}"
read -r -a peer_args <<<"${PEER_ARGS:-}"

theirs="$(free_port)"
serve_theirs "$theirs" "$threads" "$slots" --no-kv-unified --cache-ram 0 "${peer_args[@]}"
their_pid=$!
wait_for "$theirs"
ours="$(free_port)"
serve_ours "$ours" "$threads" "$slots" --prefill 1 --decode 1 --prefix-cache off "${our_args[@]}"
our_pid=$!
wait_for "$ours"
python3 tests/peers/side_by_side.py "llama-server=http://127.0.0.1:$theirs=$their_pid" "eldr=http://127.0.0.1:$ours=$our_pid"
