#!/usr/bin/env bash
# Builds eldr and the bench `device` with the feature `dynamic-backends` and puts them into FOLDER with every library they
# need, so that the folder can be taken elsewhere: ggml's library of a device (backend.sh) is put beside them there.
#
#   bash tests/gpu/program.sh FOLDER [cargo's options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

folder="${1:?the folder that the program goes to}"
shift
need_build_tools
have python3 || stop "python3 is missing; install it and run this again."
mkdir -p "$folder"
began=$SECONDS
cargo build --release --locked --features dynamic-backends --bin eldr --bench device --message-format json-render-diagnostics "$@" |
    python3 -c 'import json, pathlib, shutil, sys

folder = pathlib.Path(sys.argv[1])
def put(file, name):
    (folder / name).unlink(missing_ok=True)  # A program that runs keeps the file it has.
    shutil.copy2(file, folder / name)

# Libraries under the name that the program asks for; those in target/release are links to nothing.
for line in sys.stdin:
    told = json.loads(line)
    if told.get("executable"):
        put(told["executable"], told["target"]["name"])
    if told["reason"] == "build-script-executed" and "llama-cpp-sys-2" in told["package_id"]:
        out = pathlib.Path(told["out_dir"])
        for library in [*(out / "lib").glob("*.so.[0-9]"), *(out / "backends").glob("*.so")]:
            put(library, library.name)' "$folder"
for program in eldr device; do
    [ -x "$folder/$program" ] || stop "The build did not say where it put $program."
done
echo "built $folder in $((SECONDS - began)) s"
