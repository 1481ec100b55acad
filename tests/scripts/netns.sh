#!/usr/bin/env bash
# A decode worker behind a cable that is long and lossy and is cut in the middle of hand-offs: three network namespaces,
# here and there joined by `netns_wire.py` in the third, so that the kernel's own TCP resends what is lost.
#
# No request may fail or wait for the cable, every text must be the undisturbed one to the letter (`--exact`), and the worker must be
# lost with its cable and back with it: `netns_load.py` checks all of that, and its line of JSON is the result.
#
# Needs Python, iproute2, the right to make network namespaces (otherwise it says so and ends well) and a built `eldr`
# (ELDR, by default target/release/eldr). Takes less than a minute; CUTS=5 DELAY=20 LOSS=1 and so on for more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

eldr=${ELDR:-${CARGO_TARGET_DIR:-target}/release/eldr}
model=${MODEL:-examples/data/tiny-moe-64x4.gguf}
delay=${DELAY:-5} # ms each way
loss=${LOSS:-0.5} # per cent of the frames
n_cuts=${CUTS:-1}
cut_for=${CUT_FOR:-20} # seconds; no request may take as long
bound=${BOUND:-$cut_for}
deadline=2
scripts=tests/scripts

spaces=(here there wire)
out=$(mktemp -d)
pids=()

finish() {
    local code=$?
    set +e
    for pid in "${pids[@]}"; do
        kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null
    done
    for space in "${spaces[@]}"; do
        ip netns del "eldr-$space-$$" 2>/dev/null
    done
    [ "$code" -eq 0 ] || tail -n 5 "$out"/*.err >&2
    rm -rf "$out"
    exit "$code"
}

missing() {
    echo "not run: $1"
    exit 0
}

for tool in ip python3; do
    command -v "$tool" >/dev/null || missing "there is no $tool"
done
why=$(ip netns add "eldr-here-$$" 2>&1) || missing "no network namespace can be made here (${why%%$'\n'*})"
trap finish EXIT
ip netns add "eldr-there-$$"
ip netns add "eldr-wire-$$"

inside() {
    local space=$1
    shift
    ip netns exec "eldr-$space-$$" "$@"
}

address=10.201.77
for end in "here 1" "there 2"; do
    read -r space n <<<"$end"
    ip link add end netns "eldr-$space-$$" type veth peer name "$space" netns "eldr-wire-$$" ||
        missing "no pair of network interfaces can be made here"
    inside wire ip link set "$space" addrgenmode none up
    inside "$space" ip addr add "$address.$n/24" dev end
    inside "$space" ip link set lo up
    inside "$space" ip link set end up
    inside "$space" python3 "$scripts/netns_wire.py" --plain end
done

# await FILE WORD: until something has said it.
await() {
    for _ in $(seq 600); do
        grep -q "$2" "$1" 2>/dev/null && return
        sleep 0.1
    done
    echo "$(basename "$1") did not say '$2' within a minute" >&2
    return 1
}

ip netns exec "eldr-wire-$$" python3 "$scripts/netns_wire.py" --delay "$delay" --loss "$loss" --cut-for "$cut_for" here there \
    >"$out/wire" 2>"$out/wire.err" &
wire=$!
pids+=("$wire")
await "$out/wire" up
ip netns exec "eldr-there-$$" "$eldr" rpc-server --listen "$address.2:50052" --threads 1 >"$out/lent" 2>"$out/lent.err" &
pids+=("$!")
await "$out/lent" '^serving'

inside here python3 "$scripts/netns_load.py" --cuts "$n_cuts" --bound "$bound" "$wire" "$out/wire" "$out/serve.err" -- \
    "$eldr" serve -m "$model" --port 0 --json --exact --policy round_robin --threads 1 -c 512 --slots 4 --chunk 64 \
    --flash-attn off --prefill 1@cpu --decode "1@cpu,1@rpc:$address.2:50052" --rpc-deadline "$deadline" >"$out/result"
kill "$wire"
await "$out/wire" '"end"'
echo "$delay ms and $loss % each way, cut $n_cuts times for $cut_for s: $(cat "$out/result")"
echo "frames: $(sed -n 's/.*"frames": \({.*}\)}/\1/p' "$out/wire")"
