#!/usr/bin/env bash
# From the start of a program to the first token of a model and the program's end, through eldr's C library and by llama.cpp's
# own llama-simple of the same version.
#
#   bash tests/peers/first_token.sh PATH/TO/llama-simple [MODEL]
#
# llama-simple is an example of llama.cpp: in the build tree of the package that tests/peers/batched_bench.sh names,
# `cmake --build . --target llama-simple` makes it. Both compute on one thread; llama-simple's own number is held down by
# OMP_THREAD_LIMIT. eldr starts with its default slots, and with one slot of 256 tokens in each context, which is nearly the context that
# llama-simple makes: the difference is what it takes to fill the other slots' keys and values with zeros. Rounds are interleaved; the medians and the median of the rounds' differences count. Run it on a quiet
# machine, with the model in the page cache (the first round, which puts it there, is not counted).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

peer="$(realpath "${1:?the path of llama-simple}")"
model="${2:-examples/data/tiny-moe-64x4.gguf}"
rounds="${ROUNDS:-31}"
prompt="def read_lines(path):"

need_build_tools
work="$TARGET/peers"
mkdir -p "$work"
src/capi/packaging/install.sh "$work/engine" engine shared >/dev/null
cc -std=c11 -O2 tests/peers/first_token.c -o "$work/first_token" -I"$work/engine/include" -L"$work/engine/lib" -leldr \
    "-Wl,-rpath,$work/engine/lib"

python3 - "$rounds" "$work/first_token" "$peer" "$model" "$prompt" <<'PY'
import os, subprocess, sys, time
rounds, ours, peer, model, prompt = int(sys.argv[1]), *sys.argv[2:]
env = dict(os.environ, OMP_THREAD_LIMIT="1", LD_LIBRARY_PATH=os.path.dirname(peer))

def run(command):
    """Milliseconds from start to end, those of the processor, and the text."""
    began = time.perf_counter()
    started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    text = started.stdout.read()
    _, status, used = os.wait4(started.pid, 0)
    took = (time.perf_counter() - began) * 1000
    if status:
        sys.exit(f"{command[0]} ended with status {status}")
    return took, (used.ru_utime + used.ru_stime) * 1000, text.decode(errors="replace")

commands = [ours, model, prompt], [ours, model, prompt, "1", "256"], [peer, "-m", model, "-n", "1", "-ngl", "0", prompt]
texts = [run(command)[2].rstrip("\n") for command in commands]
token = texts[0]
if texts[1] != token or not texts[2].endswith(token):
    sys.exit(f"the first tokens differ: {texts}")
times = [[run(command)[:2] for command in commands] for _ in range(rounds)]
middle = lambda values: sorted(values)[len(values) // 2]
for at, name in enumerate(["eldr", "eldr, one slot of 256 tokens", "llama-simple"]):
    wall, cpu = (middle([of[at][i] for of in times]) for i in (0, 1))
    behind = middle([of[at][0] - of[2][0] for of in times])
    print(f"{name}: {wall:.0f} ms ({behind:+.0f} ms), {cpu:.0f} ms of the processor")
print(f"medians of {rounds} rounds; the same token {token!r}")
PY
