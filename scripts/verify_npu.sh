#!/usr/bin/env bash
# Checks everything on a real Ascend NPU, or on the stand-in, and writes one report to send back.
#
#   bash scripts/verify_npu.sh [--virtual] [--output DIR] [--calls N]
#
# Environment, operators against their contract, the tiny model's tokens, a short benchmark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arguments=()
for argument in "$@"; do
    [[ $argument != --virtual ]] || argument=device.virtual=true
    arguments+=("$argument")
done
exec bash scripts/launch.sh verify recipes/tiny/npu.yaml "${arguments[@]}"
