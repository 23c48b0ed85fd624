#!/usr/bin/env bash
# Sets up, then lets the tiny model serve 64 requests, once by static and once by continuous batching.
#
#   bash scripts/demo.sh [--requests N] [--rate PER_S] [--output FILE.png]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# It computes on the CPU: a torch_npu that is there would fail where the shell has not sourced CANN
TORCH_DEVICE_BACKEND_AUTOLOAD=0 exec .venv/bin/python -m scripts.demo "$@"
