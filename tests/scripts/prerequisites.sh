# shellcheck shell=bash
# Sourced by examples/demo.sh and tests/run.sh: what the build needs beyond git, a C++ compiler and Rust.
# As root on Debian or Ubuntu it installs what is missing; elsewhere it prints the line to run and stops.

have() { command -v "$1" >/dev/null 2>&1; }

stop() {
    printf '%s\n' "$*" >&2
    exit 1
}

# bindgen loads libclang when it reads a header; the package with the headers has the unversioned link.
have_libclang() {
    [ -z "${LIBCLANG_PATH:-}" ] || return 0
    [ "$(uname -s)" = Linux ] || return 0
    compgen -G '/usr/lib/llvm-*/lib/libclang.so' >/dev/null ||
        compgen -G '/usr/lib*/libclang.so' >/dev/null ||
        compgen -G '/usr/lib/*/libclang*.so' >/dev/null ||
        compgen -G '/usr/local/lib*/libclang.so' >/dev/null
}

need_build_tools() {
    have cargo || stop "Rust is missing; install it from https://rustup.rs and run this again."
    have c++ || have g++ || have clang++ || stop "A C++ compiler is missing; install g++ or clang and run this again."
    local missing=()
    have cmake || missing+=(cmake)
    have make || have ninja || missing+=(make)
    have_libclang || missing+=(libclang-dev)
    install_packages "${missing[@]}"
}

# install_packages NAME..: Debian's packages; nothing if none is named.
install_packages() {
    [ "$#" -gt 0 ] || return 0
    local line="apt-get install -y --no-install-recommends $*"
    have apt-get || stop "Missing: $* (Debian's names); install them with your package manager and run this again."
    [ "$(id -u)" -eq 0 ] || stop "Missing: $*. Run this line, then this script again:
    sudo apt-get update && sudo $line"
    echo "installing $*"
    [ -n "${lists_are_new:-}" ] || DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 update
    lists_are_new=1
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
        "$@" </dev/null >/dev/null
}

# What the tests of the C library and of the server use beyond the build's tools.
need_test_tools() {
    local missing=()
    have pkg-config || missing+=(pkg-config)
    have nm || missing+=(binutils)
    have valgrind || missing+=(valgrind)
    have curl || missing+=(curl)
    have python3 || missing+=(python3)
    have promtool || missing+=(prometheus)
    have chromium || have google-chrome || have chromium-browser || missing+=(chromium)
    python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    install_packages "${missing[@]}"
}

# rustfmt and clippy, which a minimal Rust does not have.
need_rust_components() {
    local missing=()
    cargo fmt --version >/dev/null 2>&1 || missing+=(rustfmt)
    cargo clippy --version >/dev/null 2>&1 || missing+=(clippy)
    [ "${#missing[@]}" -gt 0 ] || return 0
    have rustup || stop "Missing: ${missing[*]}; install them for this Rust and run this again."
    echo "installing ${missing[*]}"
    rustup component add "${missing[@]}"
}

need_prerequisites() {
    need_build_tools
    need_rust_components
    need_test_tools
}

# cargo-deny, built without optimisation (its own run is short) and kept with the build, not in the user's home.
need_cargo_deny() {
    [ -x "$(cargo_deny_path)" ] ||
        env -u CARGO_TARGET_DIR CARGO_PROFILE_DEV_DEBUG=false \
            cargo install --quiet --locked --debug --root "$TARGET/tools" cargo-deny@0.20.2
}

cargo_deny() { "$(cargo_deny_path)" "$@"; }

cargo_deny_path() { command -v cargo-deny || echo "$TARGET/tools/bin/cargo-deny"; }

# Sets `eldr` to the program: ELDR, or what is built here.
need_eldr() {
    # shellcheck disable=SC2034 # Read by whoever calls this.
    eldr="${ELDR:-$TARGET/release/eldr}"
    [ -z "${ELDR:-}" ] || return 0
    need_build_tools
    cargo build --locked --release --quiet
}

# Where cargo builds, as an absolute path: the environment, cargo's settings or ./target say.
cargo_target() {
    cargo metadata --no-deps --offline --format-version 1 2>/dev/null |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p'
}

TARGET=$(cargo_target || true)
TARGET="${TARGET:-$PWD/target}"
