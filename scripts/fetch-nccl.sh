#!/bin/sh
# Fetches NCCL as Python's package index has it, without installing it, and prints the folder that has `include` and `lib`:
#
#   TIDE_NCCL_DIR=$(scripts/fetch-nccl.sh) cargo test -p nccl-gin --test real_library -- --ignored
#
# About 300 MB come over the network, once; 600 MB lie in target/nccl afterwards. Needs pip. Nothing of it is part of the project.
set -eu

version=2.32.3
cd "$(dirname "$0")/.."
cache="${CARGO_TARGET_DIR:-target}/nccl"
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
place="$cache/$version"

if [ ! -d "$place" ]; then
    rm -rf "$cache/wheel" "$place.part"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$cache/wheel" "nvidia-nccl-cu13==$version" >&2
    python3 -m zipfile -e "$cache"/wheel/*.whl "$place.part" >&2
    rm -r "$cache/wheel"
    # Only what is whole gets the name.
    mv "$place.part" "$place"
fi
echo "$place/nvidia/nccl"
