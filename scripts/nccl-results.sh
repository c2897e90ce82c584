#!/bin/bash
# What only a GPU and the real NCCL can show, as text for docs/results: TIDE over NCCL, all ranks on one GPU.
#
# usage: scripts/nccl-results.sh NCCL MODULES PLUGIN [BIN]
#
#   NCCL     libnccl.so.2, 2.32.3
#   MODULES  the folder that `cargo xtask ptx --nccl` has filled
#   PLUGIN   libnccl_loopback_plugin.so (cargo build --release -p nccl-loopback-plugin)
#   BIN      the folder of tide-bench, target/release by default
#
# TIDE_NCCL_OLD, if set, is an older libnccl.so.2, which must be met with words. No NIC takes part, and no GDAKI: puts go through
# NCCL's copy engines (one LSA team), or through NCCL's proxy to a test plugin that copies on the GPU. Wants
# CUDA_DEVICE_MAX_CONNECTIONS=32.
set -u
nccl=$1 modules=$2 plugin=$3
bin=${4:-target/release}
bench=$bin/tide-bench
export TIDE_NCCL_LIB="$nccl" TIDE_NCCL_MODULES="$modules" NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1
through_plugin=(env "NCCL_RMA_PLUGIN=$plugin" NCCL_LSA_TEAM_SIZE=1 NCCL_GIN_TYPE=2 NCCL_NET=Socket NCCL_IB_DISABLE=1)
group=(--group "1024x96,517,300x31")
passed=0 failed=0

part() { printf '\n## %s\n\n' "$1"; }

# The last word of every digest line.
digests() { sed -n 's/^\(\[[0-9]*\] \)\{0,1\}# \(ag\|rs\) digest : /\2 /p' | tr '\n' ' '; }

expected() { timeout 120 "$bench" run --backend sim "$@" 2>&1 | digests; }

# judge WHAT EXPECTED STATUS LOG RAILS: whether a run ended well, with these digests, over rails that are named so.
judge() {
    local found
    found=$(digests <<<"$4")
    if [ "$3" -eq 0 ] && [ -n "$found" ] && [ "$found" = "$2" ] && grep -q "# rails: $5" <<<"$4"; then
        passed=$((passed + 1))
        echo "ok    $1"
    else
        failed=$((failed + 1))
        echo "FAIL  $1: status $3, digests $found instead of $2"
        tail -3 <<<"$4"
    fi
}

# compare WHAT EXPECTED RAILS COMMAND…
compare() {
    local what=$1 want=$2 rails=$3 log
    shift 3
    log=$(timeout 120 "$@" 2>&1)
    judge "$what" "$want" $? "$log" "$rails"
}

part "NCCL"
"$bench" doctor | grep -i -E "nccl|driver|GPU 0" | head -8

part "One process drives all ranks: the simulator's digests"
for shape in "2 1" "3 1" "2 2" "5 1" "3 2" "8 1" "4 2" "2 4"; do
    read -r m l <<<"$shape"
    for dtype in bf16 f32; do
        options=(--nodes "$m" --gpus "$l" "${group[@]}" --grad-dtype "$dtype" --k 2)
        want=$(expected "${options[@]}")
        run=("$bench" run --backend nccl "${options[@]}" --warmup 2)
        compare "$m x $l $dtype, host RMA by copy engines" "$want" "host path" "${run[@]}" --path host
        compare "$m x $l $dtype, host RMA by NCCL's proxy and the plugin" "$want" "host path" \
            "${through_plugin[@]}" "${run[@]}" --path host
        compare "$m x $l $dtype, GIN by NCCL's proxy and the plugin" "$want" "device path, GIN proxy" \
            "${through_plugin[@]}" "${run[@]}" --path device
    done
done

part "A process for each rank, on one GPU: windows, addresses of the node, host RMA by copy engines"
want=$(expected --nodes 1 --gpus 2 "${group[@]}")
compare "1 x 2, --spawn" "$want" "no rails" "$bench" run --backend nccl --spawn 2 "${group[@]}"
want=$(expected --nodes 1 --gpus 4 "${group[@]}")
compare "1 x 4, --spawn" "$want" "no rails" "$bench" run --backend nccl --spawn 4 "${group[@]}"
processes() {
    local m=$1 l=$2 rank log=
    shift 2
    export TIDE_RANK_COUNT=$((m * l)) TIDE_LOCAL_RANK_COUNT=$l TIDE_COMM_ID=127.0.0.1:29741 TIDE_TOKEN=results
    for rank in $(seq 1 $((m * l - 1))); do
        TIDE_RANK=$rank TIDE_LOCAL_RANK=$((rank % l)) timeout 120 "$bench" run --backend nccl "$@" >/dev/null 2>&1 &
    done
    log=$(TIDE_RANK=0 TIDE_LOCAL_RANK=0 timeout 120 "$bench" run --backend nccl "$@" 2>&1)
    status=$?
    wait
    unset TIDE_RANK_COUNT TIDE_LOCAL_RANK_COUNT TIDE_COMM_ID TIDE_TOKEN
    printf '%s\n' "$log"
    return $status
}
for shape in "2 1" "2 2" "3 2"; do
    read -r m l <<<"$shape"
    want=$(expected --nodes "$m" --gpus "$l" "${group[@]}")
    log=$(processes "$m" "$l" "${group[@]}" --path host)
    judge "$m x $l processes" "$want" $? "$log" "host path"
done

if [ -x "$bin/one_gpu" ]; then
    part "nccl-gin on two ranks of one GPU"
    timeout 120 "$bin/one_gpu" --ignored --test-threads=1 2>&1 | grep -E "^test |^ok|test result"
fi

if [ -n "${TIDE_NCCL_OLD:-}" ]; then
    part "An older NCCL"
    TIDE_NCCL_LIB=$TIDE_NCCL_OLD timeout 60 "$bench" run --backend nccl --nodes 1 --gpus 1 "${group[@]}" 2>&1 | grep -v "^# \(tide\|command\)"
    TIDE_NCCL_LIB=$TIDE_NCCL_OLD timeout 60 "$bench" run --backend nccl --nodes 2 --gpus 1 "${group[@]}" 2>&1 | tail -1
fi

printf '\n%s runs equal, %s not\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
