#!/usr/bin/env bash
# Checks everything on a real Ascend NPU, or on the stand-in, and writes one report to send back.
#
#   bash scripts/verify_npu.sh [--virtual] [--ranks N] [--output DIR] [--calls N]
#
# Environment, operators against their contract, the tiny model's tokens, a short benchmark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
while (($#)); do
    case $1 in
        --virtual) arguments+=(device.virtual=true) ;;
        --ranks) arguments+=("parallel.tensor=${2:?say how many ranks}") && shift ;; # 1 or 2: it has two heads
        *) arguments+=("$1") ;;
    esac
    shift
done
exec bash scripts/launch.sh verify recipes/tiny/npu.yaml "${arguments[@]}"
