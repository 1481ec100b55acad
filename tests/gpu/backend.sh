#!/usr/bin/env bash
# Builds one ggml backend library from the llama.cpp that eldr is pinned to, for an eldr that was built elsewhere with the
# feature `dynamic-backends`: the library goes beside that program, and nothing else of it is built here.
#
#   bash tests/gpu/backend.sh cuda FOLDER     CUDA's compiler, and CMAKE_CUDA_ARCHITECTURES, such as 90, for a shorter build
#   bash tests/gpu/backend.sh vulkan FOLDER   Vulkan's headers and loader, glslc and SPIR-V's headers
#
# LLAMA_CPP is the source, for a machine without Rust; JOBS is how many compilers run at once. What follows FOLDER is
# passed to CMake.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/scripts/prerequisites.sh
. tests/scripts/prerequisites.sh

backend="${1:?the backend: cuda, vulkan, hip, sycl ..}"
folder="${2:?the folder that the library goes to}"
shift 2
have cmake || stop "cmake is missing; install it and run this again."
if [ -z "${LLAMA_CPP:-}" ]; then
    have cargo || stop "Without Rust, say where the source is: LLAMA_CPP=.../llama-cpp-sys-2-0.1.161/llama.cpp."
    LLAMA_CPP=$(cargo metadata --locked --format-version 1 --filter-platform "$(rustc -vV | sed -n 's/^host: //p')" |
        python3 -c 'import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "llama-cpp-sys-2") + "/llama.cpp")')
fi

build="$folder/build-$backend"
options=()
# The stub of the driver's library is no part of CUDA's wheels, and virtual memory is the one thing it is for.
[ "$backend" != cuda ] || options+=(-DGGML_CUDA_NO_VMM=ON ${CMAKE_CUDA_ARCHITECTURES:+"-DCMAKE_CUDA_ARCHITECTURES=$CMAKE_CUDA_ARCHITECTURES"})
cmake -S "$LLAMA_CPP" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF \
    -DGGML_CPU=OFF "-DGGML_${backend^^}=ON" -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF "${options[@]}" "$@"
if [ "$backend" = vulkan ]; then
    headers=$(sed -n 's/^Vulkan_INCLUDE_DIR:[A-Z]*=//p' "$build/CMakeCache.txt")
    # Otherwise said by the compiler, after all the shaders.
    grep -q VkLayerSettingEXT "$headers/vulkan/vulkan_core.h" ||
        stop "Vulkan's headers in $headers are too old for this llama.cpp: name newer ones with -DVulkan_INCLUDE_DIR=FOLDER."
fi
began=$SECONDS
cmake --build "$build" --target "ggml-$backend" -j "${JOBS:-1}"
library=$(find "$build" -name "libggml-$backend.so" | head -n 1)
cp "$library" "$folder/"
echo "built $folder/libggml-$backend.so in $((SECONDS - began)) s, $(du -h "$library" | cut -f1)"
