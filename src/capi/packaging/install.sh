#!/usr/bin/env bash
# Builds the C library and installs it with its headers, pkg-config file and CMake package, on Linux:
#
#   src/capi/packaging/install.sh PREFIX [engine|router] [shared|static|both]
#
# `engine` has llama.cpp in it; `router` is for programs with a llama.cpp of their own, and is compiled without.
# Nothing outside PREFIX and cargo's target folder is written. DESTDIR is put before PREFIX. More cargo features, such as
# cuda, go into ELDR_FEATURES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

prefix=${1:?usage: install.sh PREFIX [engine|router] [shared|static|both]}
what=${2:-engine}
kinds=${3:-shared}
case $kinds in
both) kinds="shared static" ;;
shared | static) ;;
*) echo "'$kinds' is not shared, static or both" >&2 && exit 2 ;;
esac
features="capi${ELDR_FEATURES:+,$ELDR_FEATURES}"
case $what in
engine) build=(--no-default-features --features "llama,$features") ;;
router) build=(--no-default-features --features "$features") ;;
*) echo "'$what' is neither engine nor router" >&2 && exit 2 ;;
esac

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
IFS=. read -r major minor _ <<<"$version"
# Changes only if something is taken away; ELDR_ABI_VERSION grows with every addition.
so_major=1
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')/release
root=${DESTDIR:-}$prefix
mkdir -p "$root/include" "$root/lib/pkgconfig" "$root/lib/cmake/eldr"

# Both kinds come from one compilation. Line tables and the compiler's notes are not shipped in the shared one; unused code
# is left out at link time. The note's name stays, so that cargo does not compile again what has not changed.
mkdir -p "$target"
notes=$target/eldr-$what.libs
cargo rustc --release --locked --lib "${build[@]}" --crate-type cdylib,staticlib -- \
    -C "link-arg=-Wl,-soname,libeldr.so.$so_major" -C link-arg=-Wl,--gc-sections -C link-arg=-s \
    --print "native-static-libs=$notes"

libs_private=""
for kind in $kinds; do
    case $kind in
    shared)
        install -m 755 "$target/libeldr.so" "$root/lib/libeldr.so.$so_major"
        ln -sf "libeldr.so.$so_major" "$root/lib/libeldr.so"
        ;;
    static)
        libs_private=$(tr '\n' ' ' <"$notes")
        install -m 644 "$target/libeldr.a" "$root/lib/libeldr.a"
        ;;
    esac
done

install -m 644 src/capi/eldr.h src/capi/eldr.hpp "$root/include"
fill() {
    local libs=$libs_private
    # CMake's lists are cut by semicolons.
    case $1 in *.cmake.in) libs=$(echo "$libs" | sed 's/^ *//; s/ *$//; s/  */;/g') ;; esac
    sed -e "s|@PREFIX@|$prefix|g" -e "s|@LIBDIR@|lib|g" -e "s|@VERSION@|$version|g" -e "s|@MAJOR@|$major|g" \
        -e "s|@MINOR@|$minor|g" -e "s|@SO_MAJOR@|$so_major|g" -e "s|@LIBS_PRIVATE@|$libs|g" "src/capi/packaging/$1" >"$2"
}
fill eldr.pc.in "$root/lib/pkgconfig/eldr.pc"
fill eldr-config.cmake.in "$root/lib/cmake/eldr/eldr-config.cmake"
fill eldr-config-version.cmake.in "$root/lib/cmake/eldr/eldr-config-version.cmake"
echo "eldr $version ($what, $kinds) is in $root"
