#!/bin/sh
# Installs what `cargo xtask ptx` and `cargo xtask ptx --check` need, on Debian bookworm or newer. Safe to
# repeat: what is there stays. Building and using TIDE itself needs none of this.
#
#   rustc-web, rust-web-src   a stable compiler with LLVM 22 and the sources of `core`, to build it for the GPU
#   rust-web-clippy           the same compiler's lints, for the device code
#   llvm-22                   llvm-link, opt and llc
#   llvm-bitcode-linker       joins the crates' bitcode; from the compiler's own sources, into cargo's bin
#   nvidia-cuda-nvcc          ptxas, as a wheel: no CUDA installation needed
#
# Where apt has no such packages, a rustup nightly with rust-src, llvm-tools and llvm-bitcode-linker serves as well.
set -eu

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

missing=""
for package in rustc-web rust-web-src rust-web-clippy llvm-22; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
if [ -n "$missing" ]; then
    as_root apt-get update -q
    # shellcheck disable=SC2086 # a list of words
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
fi

release=$(/usr/bin/rustc -vV | sed -n 's/^release: //p')
cargo_bin="${CARGO_HOME:-$HOME/.cargo}/bin"
if [ ! -x "$cargo_bin/llvm-bitcode-linker" ]; then
    # Away from the project: its rust-toolchain.toml would choose the compiler.
    (
        cd /
        RUSTC=/usr/bin/rustc cargo install --locked \
            --path "/usr/src/rustc-$release/src/tools/llvm-bitcode-linker" \
            --target-dir "${TMPDIR:-/tmp}/llvm-bitcode-linker-build"
    )
fi

# The newest wheel that was tried; another one is chosen by hand.
python=${PYTHON:-python3}
if ! command -v ptxas >/dev/null 2>&1 && [ -z "${TIDE_PTXAS:-}" ] &&
    ! "$python" -m pip show -q nvidia-cuda-nvcc >/dev/null 2>&1; then
    if ! "$python" -m pip install -q 'nvidia-cuda-nvcc>=13,<14'; then
        # A system Python that refuses to be changed: a virtual environment that xtask also looks into.
        venv="${XDG_CACHE_HOME:-$HOME/.cache}/tide/ptxas"
        "$python" -m venv "$venv"
        "$venv/bin/pip" install -q 'nvidia-cuda-nvcc>=13,<14'
    fi
fi

echo "device toolchain: rustc $release, $(llc-22 --version | sed -n 's/.*LLVM version /LLVM /p'), $cargo_bin/llvm-bitcode-linker"
