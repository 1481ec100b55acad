# shellcheck shell=bash
# Sourced by the scripts beside it that compare servers: a folder to work in, programs that end with the script, free ports.

work="$(mktemp -d)"
pids=()
cleanup() {
    [ "${#pids[@]}" -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
wait_for() { # port
    local try
    for try in $(seq 600); do
        curl -fs -o "$work/health" "http://127.0.0.1:$1/health" && return
        sleep 0.2
    done
    tail -n 5 "$work"/*.out >&2 || true
    stop "no server answers at port $1 after $try tries"
}
