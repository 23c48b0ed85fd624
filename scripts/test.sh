#!/usr/bin/env bash
# Sets up, checks style and types, and runs the tests; stops at the first thing that fails.
#
#   bash scripts/test.sh [--fast] [PYTEST ARGUMENT ...]     --fast leaves out the tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $(uname -s) == Linux ]]; then
    bash scripts/setup.sh dev npu
else # torch_npu has no other wheels: the tests of its path are skipped
    bash scripts/setup.sh dev
fi

arguments=()
if [[ ${1:-} == --fast ]]; then
    shift
    arguments+=(-m "not slow")
fi

# One thread: the tests' tensors are small, and results must not hang on how work is split
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg

python=.venv/bin/python
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
exec "$python" -m pytest "${arguments[@]}" "$@"
