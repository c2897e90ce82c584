#!/usr/bin/env bash
# What only a GPU can show: doctor, the GPU tests, parity with the simulator bit by bit, and the sanitizer's tools.
#
#   scripts/gpu-results.sh [BIN]      BIN: a folder with `tide-bench` and the test binary `gpu`, for a machine without cargo;
#                                     without it both are built here
#
# Prints a report in Markdown; docs/results keeps them, dated. Exit status: the number of parts that failed.
set -u
cd "$(dirname "$0")/.."
bin=${1:-}
if [ -z "$bin" ]; then
  cargo build --release || exit 1
  cargo test --release --test gpu --no-run || exit 1
  bin=$(mktemp -d)
  cp target/release/tide-bench "$bin/"
  cp "$(ls -t target/release/deps/gpu-* | grep -v '\.d$' | head -1)" "$bin/gpu"
fi
bench="timeout 120 $bin/tide-bench"
failed=0
part() { printf '\n## %s\n\n' "$*"; }
verdict() { if [ "$1" -eq 0 ]; then echo "**$2: ok**"; else echo "**$2: FAILED ($1)**"; failed=$((failed + 1)); fi; }

echo "# GPU results of $(date -u +%Y-%m-%d)"
echo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/* chip, driver: /'
echo "* command: \`scripts/gpu-results.sh\`, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
echo "* CUDA_DEVICE_MAX_CONNECTIONS: ${CUDA_DEVICE_MAX_CONNECTIONS:-not set}"

part doctor
echo '```'; $bench doctor; code=$?; echo '```'
[ $code -lt 20 ]; verdict $? "doctor (status $code)"

part "GPU tests"
echo '```'; timeout 400 "$bin/gpu"; code=$?; echo '```'
verdict $code "GPU tests"

part "Parity: the same digests as the simulator"
# Digests of a run: the last word of every "digest" line.
digests() { $bench "$@" 2>&1 | sed -n 's/^# \(ag\|rs\) digest : /\1 /p' | tr '\n' ' '; }
equal=0; total=0
compare() {
  local sim cuda
  sim=$(digests --backend sim "$@")
  for path in device host; do
    cuda=$(digests --backend cuda --path $path "$@")
    total=$((total + 1))
    if [ -n "$sim" ] && [ "$sim" = "$cuda" ]; then equal=$((equal + 1)); else echo "DIFFERS: $* --path $path: sim '$sim', cuda '$cuda'"; fi
  done
}
odd="97x6,40,7x3,256x4,2x2x5,0x7,1x6x4,1"
for shape in "1 8" "2 4" "3 2" "5 4" "9 2" "1 1" "4 1" "7 3"; do
  set -- $shape
  for dtype in bf16 f32; do
    compare --nodes "$1" --gpus "$2" --grad-dtype $dtype --group $odd --alpha 0.3
    compare --nodes "$1" --gpus "$2" --grad-dtype $dtype --group $odd --alpha 0.3 --accumulate --passes 3 --k 2 --sum-ctas 3
  done
done
for preset in gpt2-small gpt2-small-root llama-3.1-8b-tiny llama-3.1-8b-vocab-tiny llama-3.1-70b-tiny qwen3-30b-a3b-tiny \
  qwen3-30b-a3b-dense-tiny qwen3-30b-a3b-unfused-tiny wan2.2-14b-block-tiny wan2.2-14b-root-tiny; do
  compare --preset $preset
  compare --preset $preset --nodes 3 --gpus 2 --grad-dtype f32
done
echo "$equal of $total runs equal"
[ $equal -eq $total ] && [ $total -gt 0 ]; verdict $? parity

part "Replay: the same digests as the simulator, in every mode"
# The digests of a replay's steps: the last word of every row.
steps() { $bench replay --steps 3 "$@" 2>&1 | awk '$1 ~ /^[0-9]+$/ {printf "%s ", $NF}'; }
equal=0; total=0
for shape in "2 4" "3 2" "1 8"; do
  set -- $shape
  for extra in "" "--accumulate-steps 2 --checkpoint"; do
    sim=$(steps --backend sim --preset llama-3.1-8b-tiny --nodes "$1" --gpus "$2" --mode in-place $extra)
    for mode in in-place slot-reuse; do
      for path in device host; do
        cuda=$(steps --backend cuda --preset llama-3.1-8b-tiny --nodes "$1" --gpus "$2" --mode $mode --path $path $extra)
        total=$((total + 1))
        if [ -n "$sim" ] && [ "$sim" = "$cuda" ]; then equal=$((equal + 1)); else echo "DIFFERS: $1x$2 $mode $path $extra: sim '$sim', cuda '$cuda'"; fi
      done
    done
  done
done
echo "$equal of $total replays equal"
[ $equal -eq $total ]; verdict $? replay
echo '```'; $bench replay --backend cuda --preset llama-3.1-8b --layers 4 --nodes 1 --gpus 8 --mode slot-reuse --no-check --steps 2; code=$?; echo '```'
verdict $code "replay of whole layers"

part "compute-sanitizer"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    for run in "--nodes 2 --gpus 2 --path device" "--nodes 1 --gpus 3 --path host --grad-dtype f32"; do
      echo '```'
      timeout 200 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/tide-bench" --backend cuda --group 97x6,40,7x3 $run 2>&1 |
        grep -vE '^# (command|seed|calls|group)'
      code=${PIPESTATUS[0]}
      echo '```'
      verdict $code "$tool $run"
    done
  done
else
  echo "skipped: compute-sanitizer is not here"
fi

printf '\n%s parts failed\n' "$failed"
exit "$failed"
