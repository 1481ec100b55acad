# shellcheck shell=bash
# Sourced, with their arguments, by the scripts beside it that compare servers: which programs and model, a folder to work in,
# servers that end with the script, free ports.

peer="${1:?the path of llama-server}"
model="${2:-examples/data/tiny-moe-64x4.gguf}"
eldr="${ELDR:-$TARGET/release/eldr}"
flash="${FLASH:-off}" # flash attention, on both sides
ctx=1024 # tokens of a sequence
by=()    # a command that starts the servers, such as taskset and its options

work="$(mktemp -d)"
pids=()
cleanup() {
    [ "${#pids[@]}" -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# serve_theirs PORT THREADS SLOTS [OPTION..]: starts a llama-server, whose process $! is then.
serve_theirs() {
    LD_LIBRARY_PATH="$(dirname "$peer")" "${by[@]}" "$peer" -m "$model" --host 127.0.0.1 --port "$1" -t "$2" -tb "$2" \
        -np "$3" -c "$((ctx * $3))" -fa "$flash" "${@:4}" >"$work/theirs.$1.out" 2>&1 &
    pids+=("$!")
}

# serve_ours PORT THREADS SLOTS [OPTION..]: starts an `eldr serve`, whose process $! is then.
serve_ours() {
    "${by[@]}" "$eldr" serve -m "$model" --port "$1" --threads "$2" --slots "$3" --ctx "$ctx" --flash-attn "$flash" "${@:4}" \
        >"$work/ours.$1.out" 2>&1 &
    pids+=("$!")
}

wait_for() { # port
    local try
    for try in $(seq 600); do
        curl -fs -o "$work/health" "http://127.0.0.1:$1/health" && return
        sleep 0.2
    done
    tail -n 5 "$work"/*.out >&2 || true
    stop "no server answers at port $1 after $try tries"
}
