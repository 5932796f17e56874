#!/usr/bin/env bash
# Everything that must be seen on a GPU before a release, in one run of about 20 minutes on an H200: GPU tests and
# sanitizer, three sweeps from empty Triton caches, what a fresh process then serves, profile and report, and the peers
# beside ours where PEERS names their folder. One line per step in OUT/steps.txt; a failed step does not stop the rest.
# The steps of the second list are the tuner's own numbers, and run only when they are named: another 20 minutes.
#
#   benchmarks/acceptance.sh OUT [STEP ...]      steps: tests sweeps served profile report peers (all when none is named)
#                                                       times repeatability memory kills truth
#   LAYERS="default mixtral-8x7b" benchmarks/acceptance.sh OUT sweeps        only these layers
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mkdir -p "${1:?usage: acceptance.sh OUT [STEP ...]}" && cd "$1" && pwd)
shift
steps=("${@:-tests sweeps served profile report peers}")
python=${PYTHON:-python3}
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
  { echo "acceptance.sh: $python's torch sees no CUDA GPU; run it on a GPU machine" >&2; exit 3; }
read -ra layers <<<"${LAYERS:-default qwen3-30b-a3b mixtral-8x7b}"
failed=0

step() { # name, seconds at most, command...
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
  echo "$name: exit $code after $((SECONDS - start)) s: $*" | tee -a "$out/steps.txt"
  [ "$code" -eq 0 ] || failed=1
}

model() { [ "$1" = default ] || echo "--model $1"; }

# Tests that read counters, clocks or free memory, or that lock the GPU or hang it on purpose, must have it to themselves; the
# others share it where xdist is there.
tests() {
  local alone=(tests/gpu/test_profile.py tests/gpu/test_cuda_backend.py tests/gpu/test_sweep_memory.py tests/gpu/test_routing.py
    tests/gpu/test_planted_kernels.py tests/gpu/test_cupti.py)
  local hostile=(tests/gpu/test_isolation.py tests/gpu/test_gpu_lock.py)
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n 6 --dist loadfile -p no:benchmark)  # a module's GPU is made once
  step tests-shared 400 "$python" -m pytest tests/gpu -q -p no:cacheprovider "${parallel[@]}" "${alone[@]/#/--ignore=}" "${hostile[@]/#/--ignore=}"
  step tests-alone 400 "$python" -m pytest "${alone[@]}" -q -p no:cacheprovider
  step tests-hostile 400 "$python" -m pytest "${hostile[@]}" -q -p no:cacheprovider
}

sweeps() {
  for layer in "${layers[@]}"; do
    rm -rf "$out/triton-$layer"
    # shellcheck disable=SC2046  # two words, or none
    TRITON_CACHE_DIR="$out/triton-$layer" step "sweep-$layer" 300 "$python" -m moetune sweep --device 0 $(model "$layer") --budget 240 \
      --out "$out/tables" --store "$out/$layer.sqlite" --record "$out/$layer.jsonl.xz"
    rm -rf "$out/triton-$layer"
  done
}

served() {
  for layer in "${layers[@]}"; do
    # shellcheck disable=SC2046
    MOETUNE_CONFIG_DIR="$out/tables" MOETUNE_DEBUG=1 step "served-$layer" 90 "$python" benchmarks/served.py $(model "$layer")
  done
}

profile() {
  MOETUNE_CONFIG_DIR="$out/tables" step profile 120 "$python" -m moetune profile --experts 64 --top-k 2 --json "$out/profile.json"
}

report() {
  step report 60 "$python" -m moetune report "$out/tables" --out "$out/report"
}

peers() {
  [ -n "${PEERS:-}" ] || { echo "peers: skipped, PEERS names no folder" | tee -a "$out/steps.txt"; return; }
  # shellcheck disable=SC1091
  source "$PEERS/unpack.sh"
  MOETUNE_CONFIG_DIR="$out/tables" step peers 400 "$python" "$PEERS/peers.py" --shapes qwen3-30b-a3b,mixtral-8x7b --formats bf16 \
    --ours benchmarks/peers_adapter.py --json "$out/peers.json"
}

times() {
  step times 570 "$python" benchmarks/sweep_times.py "$out/times.json" --model qwen3-30b-a3b mixtral-8x7b
}

repeatability() {
  step repeatability 570 "$python" benchmarks/repeatability.py "$out/repeatability.json" --pairs 5
}

memory() {
  step memory 570 "$python" benchmarks/memory_growth.py "$out/memory.json"
}

kills() {
  step kills 570 "$python" benchmarks/kill_sweep.py "$out/kills.json" --kills 5
}

truth() { # every config of truth/space.json: without a budget, so that no deadline leaves any out
  for layer in "${layers[@]}"; do
    # shellcheck disable=SC2046
    step "truth-$layer" 570 "$python" -m moetune sweep --device 0 $(model "$layer") --strategy exhaustive --tokens 16,256,4096 \
      --space benchmarks/truth/space.json --out "$out/truth-tables" --store "$out/truth-$layer.sqlite" --record "$out/truth-$layer.jsonl.xz"
  done
}

for name in ${steps[*]}; do
  "$name"
done
exit "$failed"
