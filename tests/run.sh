#!/usr/bin/env bash
# Every check of the project, cheap ones first; stops at the first that fails. The last line is the sum of all tests.
#
# Needs git, a C++ compiler and Rust; installs the rest or says how. Cargo's `release` profile throughout, so that
# llama.cpp is compiled once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

# The same cases on every machine; another seed looks for new ones.
export PROPTEST_RNG_SEED="${PROPTEST_RNG_SEED:-1}"

log=$(mktemp)
spent=$(mktemp)
current=""

summary() {
    local code=$?
    local sum passed failed
    sum=$(sed -nE 's/^test result:.* ([0-9]+) passed; ([0-9]+) failed;.*/\1 \2/p' "$log" |
        awk '{ p += $1; f += $2 } END { print p + 0, f + 0 }')
    read -r passed failed <<<"$sum"
    rm -f "$log" "$spent"
    if [ "$code" -ne 0 ]; then
        # A stage that is not a test, or a test program that died, counts as one.
        [ "$failed" -gt 0 ] || failed=1
        echo "stopped in: ${current:-start}, after $SECONDS s"
    else
        echo "all done in $SECONDS s"
    fi
    echo "$passed passed, $failed failed"
    exit "$code"
}
trap summary EXIT

# Sets `processors` to the seconds of them that all has taken which ran and ended: where other programs run too, the clock
# says little. Not in a subshell, which has times of its own.
look_at_processors() {
    times >"$spent"
    processors=$(awk -F '[ms ]+' 'END { print int($1 * 60 + $2 + $3 * 60 + $4) }' "$spent")
}

# stage NAME COMMAND..: runs it, shows its output, adds its tests to the sum.
stage() {
    current=$1
    local began=$SECONDS processors before
    look_at_processors
    before=$processors
    shift
    echo "== $current"
    "$@" </dev/null 2>&1 | tee -a "$log"
    look_at_processors
    echo "== $current: ok, $((SECONDS - began)) s, of processors $((processors - before)) s"
}

# Targets are listed by hand in Cargo.toml; one that is not would never run.
all_targets_are_named() {
    local file
    for file in tests/*.rs tests/bench/*.rs examples/*.rs; do
        grep -qF "path = \"$file\"" Cargo.toml || stop "$file is not named in Cargo.toml; add its entry"
    done
}

stage "prerequisites" need_prerequisites

stage "targets" all_targets_are_named

stage "format" cargo fmt --check
if have shellcheck; then
    stage "scripts" shellcheck -x .ci/run tests/run.sh tests/scripts/*.sh tests/peers/*.sh tests/capi/*.sh tests/server/*.sh tests/gpu/*.sh \
        src/capi/packaging/*.sh examples/demo.sh examples/paper/*.sh examples/devices/*.sh
fi
if have python3; then
    stage "prompts are what their generator writes" python3 examples/data/make_prompts.py --check
fi

# The core and the engine over a fake model: no llama.cpp, seconds.
stage "lints of the core" cargo clippy --locked --release --no-default-features --all-targets -- -D warnings
stage "lints of the C library" cargo clippy --locked --release --no-default-features --features capi --lib --test capi \
    --bench capi -- -D warnings
stage "tests of the core and the C library" cargo test --locked --release --no-default-features --features capi

# test_programs FIELD [WORD]: that field of each test program in Cargo.toml, of those alone that have the word.
test_programs() {
    awk -v RS= -v field="$1" -v word="${2:-}" '
        /\[\[test\]\]/ && index($0, word) { sub(".*\n" field " = \"", ""); sub(/".*/, ""); print }' Cargo.toml
}

# Whoever adds a test program need not know which stage runs it.
every_test_ran() {
    local path paths
    mapfile -t paths < <(test_programs path)
    for path in "${paths[@]}"; do
        grep -qF " $path (" "$log" || stop "$path was run by no stage of this script"
    done
}

# Everything. Tests that compute with llama.cpp use every core, so they run one at a time. Test programs of the core alone
# have run above.
stage "lints" cargo clippy --locked --release --all-targets -- -D warnings
stage "the program without what tests bring" cargo check --locked --release
mapfile -t with_llama < <(test_programs name '"llama"')
stage "tests" env RUST_TEST_THREADS=1 cargo test --locked --release --lib --bins "${with_llama[@]/#/--test=}" --test server \
    --test engine --test recovery
stage "examples in the documentation" cargo test --locked --release --doc
stage "every test was in a stage" every_test_ran
ELDR="$TARGET/release/eldr"
stage "real clients of the server" tests/server/clients.sh "$ELDR"
stage "running the server" python3 tests/server/operations.py "$ELDR"
stage "many, slow and hostile clients" tests/server/load.sh "$ELDR"
stage "a cut cable" env ELDR="$ELDR" tests/scripts/netns.sh
stage "benches and examples build" cargo build --locked --release --benches --examples
stage "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --locked --release --no-deps

stage "checks of a device, on the CPU" env DEVICE=cpu SIZE=small OUT="$(mktemp -d)" tests/gpu/run.sh

stage "figures of the paper, small" env ELDR="$ELDR" OUT="$(mktemp -d)" examples/paper/run.sh small
stage "main result, small" env ELDR="$ELDR" OUT="$(mktemp -d)" examples/paper/main_result.sh small
stage "simulator against bench, small" env ELDR="$ELDR" OUT="$(mktemp -d)" SMALL=1 examples/paper/validate.sh

stage "C library from outside" tests/capi/run.sh

stage "cargo-deny" need_cargo_deny
stage "bans, licences, sources" cargo_deny check --hide-inclusion-graph bans licenses sources
