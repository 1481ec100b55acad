#!/usr/bin/env bash
# One `eldr serve` with several workers against as many llama-server processes behind nginx (least_conn): throughput and the
# time an output token takes, as ratios, interleaved in one run.
#
#   bash tests/peers/nginx.sh PATH/TO/llama-server [MODEL]
#
# Both sides have WORKERS (2) workers of one thread each, SLOTS (8) sequences a worker, no flash attention and the same
# requests: CLIENTS (16) at a time, of examples/data/task.serve.jsonl. No more workers than cores: threads that wait for one
# another spin each other down. Needs nginx, and the program that llama_server.sh tells how to install. ROUNDS (7) rounds of
# SECONDS_A_SIDE (15) take about four minutes; run it on a quiet machine. ELDR_ARGS are more options of `eldr serve`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

peer="${1:?the path of llama-server}"
model="${2:-examples/data/tiny-moe-64x4.gguf}"
eldr="${ELDR:-$TARGET/release/eldr}"
workers="${WORKERS:-2}"
slots="${SLOTS:-8}"
ctx=512
read -r -a more <<<"${ELDR_ARGS:-}"
have nginx || install_packages nginx
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
    stop "no server answers at port $1 after $try tries"
}

upstream=""
for _ in $(seq "$workers"); do
    port="$(free_port)"
    LD_LIBRARY_PATH="$(dirname "$peer")" "$peer" -m "$model" --host 127.0.0.1 --port "$port" -t 1 -tb 1 -np "$slots" \
        -c "$((ctx * slots))" -fa off --no-kv-unified -ub 64 >"$work/theirs.$port" 2>&1 &
    pids+=("$!")
    wait_for "$port"
    upstream="$upstream server 127.0.0.1:$port max_fails=0;"
done
theirs="$(free_port)"
cat >"$work/nginx.conf" <<CONF
daemon off;
pid $work/nginx.pid;
error_log $work/nginx.log;
worker_processes 1;
events { worker_connections 1024; }
http {
    access_log off;
    client_body_temp_path $work/body;
    proxy_temp_path $work/proxy;
    fastcgi_temp_path $work/fastcgi;
    uwsgi_temp_path $work/uwsgi;
    scgi_temp_path $work/scgi;
    upstream servers { least_conn; $upstream }
    server {
        listen 127.0.0.1:$theirs;
        location / {
            proxy_pass http://servers;
            proxy_http_version 1.1;
            proxy_set_header Connection close; # llama-server ends a kept connection when it likes
            proxy_buffering off;
            proxy_read_timeout 300s;
        }
    }
}
CONF
"$(command -v nginx || echo /usr/sbin/nginx)" -c "$work/nginx.conf" 2>"$work/nginx.err" &
pids+=("$!")
ours="$(free_port)"
"$eldr" serve -m "$model" --port "$ours" --threads 1 --prefill 1 --decode "$workers" --slots "$slots" --ctx "$ctx" \
    --flash-attn off "${more[@]}" >"$work/ours" 2>&1 &
pids+=("$!")
wait_for "$theirs"
wait_for "$ours"
python3 tests/peers/nginx.py "http://127.0.0.1:$theirs" "http://127.0.0.1:$ours" "${CLIENTS:-16}" "${SECONDS_A_SIDE:-15}" "${ROUNDS:-7}"
