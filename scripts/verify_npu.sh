#!/usr/bin/env bash
# Checks everything on a real Ascend NPU, or on the stand-in, and writes one report to send back.
#
#   bash scripts/verify_npu.sh [--virtual] [--ranks N] [--output DIR] [--calls N]
#
# Environment, operators against their contract, the tiny model's tokens, a short benchmark; of N devices, which are
# 2, 4, 8 and so on, also their collectives.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
while (($#)); do
    case $1 in
        --virtual) arguments+=(device.virtual=true) ;;
        --ranks) arguments+=("parallel.tensor=${2:?say how many ranks}") && shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
exec bash scripts/launch.sh verify recipes/tiny/npu.yaml "${arguments[@]}"
