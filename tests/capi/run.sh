#!/usr/bin/env bash
# The C library from outside: built, installed, linked and misused as its users would. Stops at the first fault.
#
#   tests/capi/run.sh            everything
#   tests/capi/run.sh router     without llama.cpp: seconds
#
# Needs a C and C++ compiler, binutils, cmake and pkg-config. valgrind is used where it is installed, and it is said where not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

which=${1:-all}
case $which in all | router) ;; *) stop "'$which' is neither all nor router" ;; esac
work=$TARGET/capi
mkdir -p "$work"
model=examples/data/tiny-moe-64x4.gguf
warnings=(-Wall -Wextra -Werror -pedantic)
c=(cc -std=c11 "${warnings[@]}" -O1 -g -pthread)
cpp=(c++ -std=c++17 "${warnings[@]}" -O1 -g -pthread)

for tool in cc c++ cmake nm objdump pkg-config; do
    have "$tool" || stop "$tool is missing; install build-essential, binutils, cmake and pkg-config and run this again."
done

step() { echo "-- $*"; }

# checked NAME COMMAND..: under memcheck, where there is one. Threads take turns, so that none that waits starves others.
checked() {
    local name=$1
    shift
    if have valgrind; then
        valgrind --quiet --fair-sched=yes --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite \
            --show-leak-kinds=definite "$@" || stop "$name: valgrind found the above"
        echo "   $name: valgrind finds nothing"
    else
        echo "   $name: NOT checked by valgrind, which is missing: apt-get install valgrind"
    fi
}

# exports LIBRARY: every symbol it defines for others is eldr's.
exports() {
    local others
    others=$(nm -D --defined-only "$1" | awk '{ print $3 }' | grep -v '^eldr_' || true)
    [ -z "$others" ] || stop "$1 shows symbols that are not eldr's: $(echo "$others" | head -n 5 | tr '\n' ' ')"
    echo "   $(nm -D --defined-only "$1" | wc -l) symbols, all eldr's"
}

# at_most MB FILE
at_most() {
    local bytes
    bytes=$(stat -c %s "$2")
    [ "$bytes" -lt $(($1 * 1000000)) ] || stop "$2 has $bytes bytes, more than $1 MB"
    echo "   $bytes bytes, below $1 MB"
}

# linked PREFIX: how to compile and link against what is installed there, and find it when run.
linked() { echo "-I$1/include -L$1/lib -leldr -Wl,-rpath,$1/lib"; }

step "the router's library, installed"
router=$work/router
src/capi/packaging/install.sh "$router" router both
exports "$router/lib/libeldr.so"
at_most 3 "$(readlink -f "$router/lib/libeldr.so")"
# It neither has llama.cpp nor asks for it.
if nm "$router/lib/libeldr.a" 2>/dev/null | grep -E ' [TtU] (ggml|llama)_' >/dev/null; then
    stop "the router's library has or wants symbols of llama.cpp"
fi
[ "$(objdump -p "$router/lib/libeldr.so" | awk '/SONAME/ { print $2 }')" = libeldr.so.1 ] || stop "no soname"

step "misuse of the router"
# shellcheck disable=SC2046
"${c[@]}" tests/capi/abuse.c tests/capi/abuse_engine.c -o "$work/abuse_router" $(linked "$router")
"$work/abuse_router"
checked abuse "$work/abuse_router"
# shellcheck disable=SC2046
"${c[@]}" -fsanitize=address,undefined tests/capi/abuse.c tests/capi/abuse_engine.c -o "$work/abuse_router_asan" $(linked "$router")
"$work/abuse_router_asan"

step "a CMake project that finds the package"
# cmake refuses a build folder of another checkout, or one that was copied.
rm -rf "$work/consumer" "$work/consumer_asan"
cmake -S tests/capi/consumer -B "$work/consumer" -DCMAKE_PREFIX_PATH="$router" >/dev/null
cmake --build "$work/consumer" >/dev/null
for kind in eldr static; do
    "$work/consumer/consumer_$kind"
done
checked consumer "$work/consumer/consumer_eldr"
cmake -S tests/capi/consumer -B "$work/consumer_asan" -DCMAKE_PREFIX_PATH="$router" -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_C_FLAGS=-fsanitize=address,undefined -DCMAKE_CXX_FLAGS=-fsanitize=address,undefined >/dev/null
cmake --build "$work/consumer_asan" >/dev/null
for kind in eldr static; do
    "$work/consumer_asan/consumer_$kind"
done

step "pkg-config"
export PKG_CONFIG_PATH=$router/lib/pkgconfig
# shellcheck disable=SC2046
"${cpp[@]}" -c tests/capi/consumer/main.cpp -o "$work/main.o" $(pkg-config --cflags eldr)
# shellcheck disable=SC2046
"${c[@]}" -c tests/capi/consumer/plain.c -o "$work/plain.o" $(pkg-config --cflags eldr)
# shellcheck disable=SC2046
c++ "$work/main.o" "$work/plain.o" -o "$work/by_pkg_config" $(pkg-config --libs eldr) -Wl,-rpath,"$router/lib"
"$work/by_pkg_config"

[ "$which" = all ] || exit 0

step "the engine's library, installed"
engine=$work/engine
src/capi/packaging/install.sh "$engine" engine shared
exports "$engine/lib/libeldr.so"
at_most 40 "$(readlink -f "$engine/lib/libeldr.so")"

step "misuse of the engine"
# shellcheck disable=SC2046
"${c[@]}" tests/capi/abuse.c tests/capi/abuse_engine.c -o "$work/abuse_engine" $(linked "$engine")
"$work/abuse_engine" "$model"
# shellcheck disable=SC2046
"${c[@]}" -fsanitize=address,undefined tests/capi/abuse.c tests/capi/abuse_engine.c -o "$work/abuse_engine_asan" $(linked "$engine")
"$work/abuse_engine_asan" "$model"
checked "abuse of the engine" "$work/abuse_engine" "$model"

step "a process that ends with an engine open"
# shellcheck disable=SC2046
"${c[@]}" tests/capi/exit.c -o "$work/exit" $(linked "$engine")
for way in exit return exit return; do
    "$work/exit" "$model" "$way" || stop "ending by $way: code $?"
done
checked "an engine open at the end" "$work/exit" "$model" exit

step "a host with its own contexts sees what the engine sees"
# In Rust, with the features that tests/run.sh has compiled already.
ELDR_CAPI_DIR=$work cargo test --quiet --release --locked --test capi_reference -- --ignored
# The same llama.cpp, from where cargo has put its headers and archives.
llama=$(cargo test --quiet --release --locked --no-run --test capi_reference --message-format=json |
    sed -n 's/.*"reason":"build-script-executed".*llama-cpp-sys-2.*"out_dir":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -d "$llama/lib" ] || stop "cargo did not say where llama.cpp is"
archives=(-L"$llama/lib" "-Wl,--start-group" -lllama -lggml -lggml-rpc -lggml-cpu -lggml-base "-Wl,--end-group" -lgomp -ldl)
for kind in router engine; do
    prefix=$work/$kind
    # llama.cpp's headers are not ours to warn about. With the engine's library two ggml are in one process.
    # shellcheck disable=SC2046
    "${cpp[@]}" -isystem "$llama/include" examples/byo_context.cpp -o "$work/byo_$kind" $(linked "$prefix") \
        "${archives[@]}"
    "$work/byo_$kind" "$model" "$work/calibration.safetensors" "$work/prompts.txt" >"$work/byo_$kind.txt"
    diff "$work/engine.txt" "$work/byo_$kind.txt" || stop "the host's picks, signatures or decisions are not the engine's"
    echo "   beside the $kind's library: $(wc -l <"$work/engine.txt") prompts, bit for bit"
done

step "examples/embed.c"
# shellcheck disable=SC2046
"${c[@]}" examples/embed.c -o "$work/embed" $(linked "$engine")
"$work/embed" "$model" | tee "$work/embed.txt"
grep -q '32 tokens' "$work/embed.txt" || stop "embed did not write 32 tokens"
# shellcheck disable=SC2046
"${c[@]}" -fsanitize=address,undefined examples/embed.c -o "$work/embed_asan" $(linked "$engine")
"$work/embed_asan" "$model" >/dev/null
checked embed "$work/embed" "$model" >"$work/embed_checked.txt"
tail -n 1 "$work/embed_checked.txt"

step "examples/embed_tokio.rs"
cargo run --quiet --release --locked --example embed_tokio
echo "-- all done"
