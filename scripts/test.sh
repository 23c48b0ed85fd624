#!/usr/bin/env bash
# Sets up, checks style and types, and runs the tests; stops at the first thing that fails.
#
#   bash scripts/test.sh [--all | --thorough] [PYTEST ARGUMENT ...]
#
# Without an option it leaves out the tests marked slow, and takes some minutes. --all has all tests and is what
# CI runs; --thorough has all of them with every random case that docs/tests.md counts. One more test runs at a
# time than there are cores, since many wait for processes, and those of a file run in their order; -n 0 to debug.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) # nproc heeds that variable
arguments=(-n $((cores + 1)) --dist loadfile --no-loadscope-reorder -p tests.progress --durations=5)
arguments+=(--max-worker-restart=0) # one that replaces a crashed worker may wait for ever for a second file
case ${1:-} in
--all) shift ;;
--thorough)
    shift
    export THOROUGH=1
    ;;
*) arguments+=(-m "not slow") ;;
esac

if [[ $(uname -s) == Linux ]]; then
    bash scripts/setup.sh dev serve npu
else # torch_npu has no other wheels: the tests of its path are skipped
    bash scripts/setup.sh dev serve
fi

# One thread: the tests' tensors are small, and results must not hang on how work is split
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
# Hundreds of processes are started: where an environment forbids it, each would compile every module anew
export PYTHONDONTWRITEBYTECODE=

python=.venv/bin/python
checked() { # a name, and a command that is silent if it finds nothing
    local began=$SECONDS name=$1
    shift
    "$@" || exit
    echo "$name: right, $((SECONDS - began)) s"
}
style() { "$python" -m ruff check --quiet && "$python" -m ruff format --check --quiet; }
types() { "$python" -m mypy --no-error-summary; }
checked style style
checked types types
began=$SECONDS status=0
"$python" -m pytest "${arguments[@]}" "$@" || status=$?
echo "tests: $([[ $status == 0 ]] && echo right || echo WRONG), $((SECONDS - began)) s"
exit "$status"
