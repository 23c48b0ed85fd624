#!/usr/bin/env bash
# Sets the environment that a recipe's device wants, says what was set, then runs a verb on the recipe.
#
#   bash scripts/launch.sh [--dry-run] VERB [ARGUMENT ...] RECIPE.yaml [ARGUMENT ...]
#   bash scripts/launch.sh generate recipes/tiny/cpu.yaml --prompt "12+7="
#   bash scripts/launch.sh generate DIR --prompt "12+7="     DIR: a checkpoint's folder, or ORG/NAME
#
# On each machine of a cluster the same command is given: see docs/cluster.md. A variable that is set already
# stays. --dry-run prints, and runs nothing. PYTHON=... names another Python, ASCEND=... the directory where CANN
# is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "launch: $*" >&2
    exit 2
}

set_unless() { # NAME VALUE: for a variable that the user did not set
    if [[ -z ${!1:-} ]]; then
        export "$1=$2"
        echo "launch: $1=$2" >&2
    fi
}

preload() { # each library that is there
    local library
    for library in "$@"; do
        # the loader takes a space or a colon for the end of a name
        if [[ -e $library && $library != *[[:space:]:]* && ":${LD_PRELOAD:-}:" != *":$library:"* ]]; then
            export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
            echo "launch: LD_PRELOAD has $library" >&2
        fi
    done
}

source_first() { # the first of these files that is there; fails where none is
    local file
    for file in "$@"; do
        if [[ -f $file ]]; then
            set +eu # these files expect it
            # shellcheck disable=SC1090
            source "$file"
            set -eu
            echo "launch: sourced $file" >&2
            return
        fi
    done
    return 1
}

tcmalloc() { ldconfig -p 2>/dev/null | sed -n 's/.*libtcmalloc\(_minimal\)\?\.so\.4 .* => //p' | head -1; }

# shellcheck source=scripts/cann.sh
source scripts/cann.sh

dry_run=
[[ ${1:-} == --dry-run ]] && dry_run=yes && shift
(($# >= 2)) || die "say what to run, as in: bash scripts/launch.sh generate RECIPE.yaml --prompt TEXT"
verb=$1
shift
[[ -f scripts/$verb.py || -f scripts/$verb/__main__.py ]] || die "there is no scripts/$verb.py"

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || die "there is no Python at $python; run bash scripts/setup.sh, or set PYTHON=..."
# In place of a recipe, a folder of weights, or ORG/NAME: the recipe that fits is chosen once, for all ranks. CANN is
# not sourced yet, without which the torch_npu fails that torch would load by itself
mapfile -d '' -t settled < <(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -m recipes.fitting "$verb" "$@")
wait $! || exit 2
set -- "${settled[@]}"
# Where no recipe is among the arguments, the verb itself says what it takes
found=$("$python" -m recipes.cluster.launched "$@") || exit 2
mapfile -t found <<<"$found"
device=${found[0]} node=${found[1]}

preload "$(tcmalloc)"
case $device in
    cpu)
        preload "$("$python" -c 'import sys; print(sys.prefix)')/lib/libiomp5.so"
        # Beside CANN a torch_npu may be there, which torch would load by itself; a verb without a recipe decides itself
        if ((${#found[@]} > 2)) && cann_home >/dev/null; then
            set_unless TORCH_DEVICE_BACKEND_AUTOLOAD 0
        fi
        ;;
    npu)
        ascend=${ASCEND:-/usr/local/Ascend}
        if [[ -z ${ASCEND_TOOLKIT_HOME:-}${ASCEND_HOME_PATH:-} ]]; then
            home=$(cann_home) || die "CANN and its set_env.sh are not in $ascend or ~/Ascend; install it, or name its place by ASCEND=..."
            source_first "${home%/latest}/set_env.sh" "$home/set_env.sh"
        fi
        # NNAL's file chooses its libraries by the ABI of python3's torch, which must be the torch that is launched;
        # torch_npu, which that torch would load by itself, may need these very libraries
        python3() { TORCH_DEVICE_BACKEND_AUTOLOAD=0 command "$python" "$@"; }
        [[ -n ${ATB_HOME_PATH:-} ]] || source_first "$ascend/nnal/atb/set_env.sh" ~/Ascend/nnal/atb/set_env.sh ||
            echo "launch: no NNAL in $ascend or ~/Ascend: operators of ATB are not there" >&2
        unset -f python3
        # On aarch64 libgomp must be the first to ask for thread-local storage; an image's torch is not in the .venv
        if [[ $(uname -m) == aarch64 ]]; then
            torch=$("$python" -c 'import importlib.util as u; print(getattr(u.find_spec("torch"), "origin", ""))')
            preload "${torch%/*}".libs/libgomp*.so*
            # Threads stay on the cores near their NPU. Interrupts stay where they are: to move them, torch_npu
            # stops the machine's irqbalance
            set_unless CPU_AFFINITY_CONF 1,npu_affine:1,bind_irq:0
        fi
        set_unless PYTORCH_NPU_ALLOC_CONF expandable_segments:True
        set_unless TASK_QUEUE_ENABLE 1
        set_unless HCCL_OP_EXPANSION_MODE AIV # collectives by the vector cores; products without them ignore it
        ;;
esac

if ((node)); then # the first machine leads, and the others hold further ranks of its engine
    command=("$python" -m scripts.follow "${found[@]:2}")
else
    command=("$python" -m "scripts.$verb" "$@")
fi
echo "launch: ${command[*]@Q}" >&2
if [[ -n $dry_run ]]; then
    "$python" -m recipes.cluster.launched --table "$@" >&2
else
    exec "${command[@]}"
fi
