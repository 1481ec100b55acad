#!/usr/bin/env bash
# What the program of program.sh does about ggml's libraries, where no device is needed: none, a damaged one, the CPU's in
# another folder, none for the CPU. Half a minute; stops at the first thing that is not as it should be.
#
#   bash tests/gpu/libraries.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

from="${1:?the folder of program.sh}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/beside" "$work/only" "$work/empty" "$work/no-cpu"
cp "$from/eldr" "$from"/lib*.so* "$work/beside"
rm -f "$work/beside"/libggml-{cuda,vulkan,hip,sycl,opencl}.so
unset GGML_BACKEND_DIR GGML_BACKEND_PATH LD_LIBRARY_PATH

# eldr ARG..: what it writes goes to $work/out and $work/err; from another folder, so that only its own is looked in.
model="$PWD/examples/data/tiny-moe-64x4.gguf"
eldr() { (cd "$work/empty" && timeout 100 "$work/beside/eldr" "$@" > "$work/out" 2> "$work/err"); }
answers() { eldr run -m "$model" -t 1 -n 8 --temperature 0 "$@" 'def add(a, b):'; }
# says WHAT PATTERN N: WHAT stands in N lines of the errors and the output.
says() {
    local n
    n=$(cat "$work/out" "$work/err" | grep -cE "$2" || true)
    [ "$n" = "$3" ] || stop "$1: $n lines say '$2', not $3:
$(cat "$work/out" "$work/err")"
    echo "$1: $(cat "$work/out" "$work/err" | grep -E "$2" | head -n 1)"
}

answers || stop "eldr does not run with no library of a device: $(cat "$work/err")"
plain=$(cat "$work/out")
says "no library of a device" 'cannot be used' 0

damaged="$work/beside/libggml-cuda.so"
echo "not a library" > "$damaged"
answers || stop "eldr does not run beside a damaged library: $(cat "$work/err")"
[ "$(cat "$work/out")" = "$plain" ] || stop "a damaged library changes what the CPU answers"
says "a damaged library, and the CPU is used" 'libggml-cuda.so cannot be used: .' 1
eldr doctor --plan -m "$model" || true
says "the doctor" 'warn.*libggml-cuda.so cannot be used: .*remove the file' 1
! answers --prefill 1@cuda:0 --decode 1@cuda:0 || stop "there is no cuda:0, and yet it runs"
says "its device asked for" 'no device "cuda:0".*libggml-cuda.so cannot be used' 1
rm "$damaged"

! GGML_BACKEND_PATH="$work/nowhere.so" answers --decode 1@cuda:0 || stop "there is no cuda:0, and yet it runs"
says "GGML_BACKEND_PATH names nothing" '^eldr: warn.*nowhere.so cannot be used: .*No such file' 1

mv "$work/beside"/libggml-cpu*.so "$work/only"
GGML_BACKEND_DIR="$work/only" answers || stop "GGML_BACKEND_DIR does not find the CPU's library: $(cat "$work/err")"
[ "$(cat "$work/out")" = "$plain" ] || stop "the CPU's library answers otherwise from another folder"
echo "GGML_BACKEND_DIR: the CPU's libraries are found there"
# With nothing at all in the folder llama.cpp would look in the usual places.
cp "$work/beside/libggml-rpc.so" "$work/no-cpu"
for verb in "run -m $model hello" "doctor --plan -m $model" "rpc-server --listen 127.0.0.1:0"; do
    # shellcheck disable=SC2086
    ! GGML_BACKEND_DIR="$work/no-cpu" eldr $verb || stop "without a library for the CPU '$verb' ends well"
    says "no library for the CPU, ${verb%% *}" "libggml-cpu.*no-cpu: copy" 1
done
