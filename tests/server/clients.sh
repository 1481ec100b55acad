#!/usr/bin/env bash
# Runs real clients against `eldr serve` with the shipped model: the official openai package for Python, LangChain, curl,
# Prometheus' promtool, and Chromium with Playwright.
#   tests/server/clients.sh [PROGRAM] [PYTHON]
# PYTHON must have the packages openai, langchain-openai and playwright; without one given, a virtual environment is made and
# they are installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

program=${1:-$TARGET/release/eldr}
python=${2:-}
work=$(mktemp -d)
server=
cleanup() {
    [ -z "$server" ] || kill -TERM "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT

packages=(openai langchain-openai)
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
[ -z "$browser" ] || packages+=(playwright)
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    # Most modules are never imported, and need no bytecode.
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "${packages[@]}"
    python=$work/venv/bin/python
fi

printf 'a-test-key\n' >"$work/keys"
"$program" serve --port 0 --json --threads 1 --exact --api-key-file "$work/keys" --request-log "$work/log.jsonl" \
    >"$work/started" 2>"$work/said" &
server=$!
for _ in $(seq 600); do
    [ -s "$work/started" ] && break
    kill -0 "$server" || { cat "$work/said"; exit 1; }
    sleep 0.1
done
url=$("$python" -c 'import json,sys; print(json.load(open(sys.argv[1]))["url"])' "$work/started")

"$python" tests/server/clients.py "$url" a-test-key

curl -fsS "$url/health" | grep -q '"ok"'
curl -fsS -H 'Authorization: Bearer a-test-key' "$url/metrics" >"$work/metrics"
for name in eldr_requests_total eldr_route_seconds_bucket eldr_handoff_seconds_bucket eldr_handoff_fallback_total \
    eldr_cache_blocks_total; do
    grep -q "^$name{" "$work/metrics" || { echo "no $name in the metrics"; exit 1; }
done
# llama-server's names have a colon, which promtool's style check does not like, whoever has them.
grep -v 'llamacpp:' "$work/metrics" | promtool check metrics
promtool check metrics <"$work/metrics" 2>&1 | grep -v "metric names should not contain ':'" && exit 1
echo 'promtool: the metrics are sound'

if [ -n "$browser" ]; then
    "$python" tests/server/page.py "$url" a-test-key "$browser"
else
    echo 'no Chromium here: the status page is not looked at'
fi
"$python" - "$work/log.jsonl" <<'PY'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert lines and all(line["outcome"] for line in lines), "a line of the request log has no outcome"
assert not any("prompt" in line or "text" in line for line in lines), "the request log has text nobody asked for"
print(f"request log: {len(lines)} lines")
PY

kill -TERM "$server"
wait "$server"
server=
echo 'clients: all passed'
