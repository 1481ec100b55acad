#!/usr/bin/env bash
# Many, slow, silent and hostile clients of `eldr serve` with the shipped model: answers must be whole and equal, slots and
# memory given back. Times are printed, not judged.
#   tests/server/load.sh [PROGRAM [STREAMS [SECONDS]]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

program=${1:-$TARGET/release/eldr}
streams=${2:-256}
seconds=${3:-8}
work=$(mktemp -d)
server=
cleanup() {
    [ -z "$server" ] || kill -TERM "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

# A thousand connections that say nothing, on both ends, and some that do.
[ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 4096 ] || ulimit -n 4096
"$program" serve --port 0 --json --threads 1 --exact --ctx 1024 >"$work/started" 2>"$work/said" &
server=$!
for _ in $(seq 600); do
    [ -s "$work/started" ] && break
    kill -0 "$server" || { cat "$work/said"; exit 1; }
    sleep 0.1
done
url=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["url"])' "$work/started")

python3 tests/server/streams.py "$url" "$streams" 8 "$server"
python3 tests/server/health.py "$url" "$((seconds / 2))" 1800
python3 tests/server/abuse.py "$url" "$server" "$seconds"
kill -TERM "$server"
wait "$server"
server=
echo "load: all passed, $SECONDS s"
