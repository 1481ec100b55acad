#!/usr/bin/env bash
# One `eldr serve` with several workers against as many llama-server processes behind nginx, by round robin and by least_conn, and
# behind Paddler where that is installed: throughput, TTFT, TPOT and processor's time as ratios, interleaved in one run, on a workload
# in which routing has something to win and on one in which it has not.
#
#   bash tests/peers/nginx.sh PATH/TO/llama-server [MODEL]
#
# Both sides have WORKERS (2) workers of one thread each (eldr PREFILL prefill workers beside them, as many, which take turns with
# them), SLOTS (8) sequences a worker, flash attention as FLASH says (off), no prefix cache and the same requests. No more workers than cores: threads that wait for one another spin each other down. Needs nginx, and the program that
# batched_bench.sh tells how to install. WORKLOADS ("mixed one"), CLIENTS ("16"), ROUNDS (5) and SCALE (1): see side_by_side.py. Run it
# on a quiet machine. ELDR_ARGS are more options of `eldr serve`. PADDLER is the program of Paddler 1.0.0 (`cargo install paddler
# --version 1.0.0 --locked`; the crate of 3.1.2 has no program), if it is to be compared. That side has not been run yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh
# shellcheck source=tests/peers/servers.sh
. tests/peers/servers.sh

workers="${WORKERS:-2}"
prefill="${PREFILL:-$workers}"
slots="${SLOTS:-8}"
read -r -a our_args <<<"${ELDR_ARGS:-}"
have nginx || install_packages nginx

upstream="" their_pids="" their_ports=()
for _ in $(seq "$workers"); do
    port="$(free_port)"
    serve_theirs "$port" 1 "$slots" --no-kv-unified --cache-ram 0
    their_pids="$their_pids${their_pids:+,}$!"
    their_ports+=("$port")
    wait_for "$port"
    upstream="$upstream server 127.0.0.1:$port max_fails=0;"
done
turns="$(free_port)"
least="$(free_port)"
listener() { # name, port
    cat <<CONF
    server {
        listen 127.0.0.1:$2;
        location / {
            proxy_pass http://$1;
            proxy_http_version 1.1;
            proxy_set_header Connection close; # llama-server ends a kept connection when it likes
            proxy_buffering off;
            proxy_read_timeout 300s;
        }
    }
CONF
}
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
    upstream turns { $upstream }
    upstream least { least_conn; $upstream }
$(listener turns "$turns")
$(listener least "$least")
}
CONF
"$(command -v nginx || echo /usr/sbin/nginx)" -c "$work/nginx.conf" 2>"$work/nginx.out" &
pids+=("$!")
ours="$(free_port)"
serve_ours "$ours" 1 "$slots" --prefill "$prefill" --decode "$workers" --prefix-cache off "${our_args[@]}"
our_pid=$!
sides=("nginx round_robin=http://127.0.0.1:$turns=$their_pids" "nginx least_conn=http://127.0.0.1:$least=$their_pids")
if [ -n "${PADDLER:-}" ]; then
    paddled="$(free_port)"
    manager="$(free_port)"
    "$PADDLER" balancer --management-addr "127.0.0.1:$manager" --reverseproxy-addr "127.0.0.1:$paddled" >"$work/paddler.out" 2>&1 &
    pids+=("$!")
    for port in "${their_ports[@]}"; do
        "$PADDLER" agent --external-llamacpp-addr "127.0.0.1:$port" --local-llamacpp-addr "127.0.0.1:$port" \
            --management-addr "127.0.0.1:$manager" --monitoring-interval 1 >"$work/agent.$port.out" 2>&1 &
        pids+=("$!")
    done
    wait_for "$paddled"
    sides+=("paddler=http://127.0.0.1:$paddled=$their_pids")
fi
wait_for "$turns"
wait_for "$least"
wait_for "$ours"
WORKLOADS="${WORKLOADS:-mixed one}" CLIENTS="${CLIENTS:-16}" python3 tests/peers/side_by_side.py "${sides[@]}" \
    "eldr=http://127.0.0.1:$ours=$our_pid"
