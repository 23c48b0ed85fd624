#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements into it; when nothing has changed, does nothing.
#
#   bash scripts/setup.sh [EXTRA ...]     an EXTRA is a requirements/EXTRA.txt, or npu (requirements-npu.txt)
#   PYTHON=python3.12 bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "setup: $*" >&2
    exit 1
}

known=()
for file in requirements-npu.txt requirements/*.txt; do
    file=${file##*[/-]}
    known+=("${file%.txt}")
done
wanted=(requirements.txt)
for extra in "$@"; do
    [[ " ${known[*]} " == *" $extra "* ]] || die "there is no extra '$extra'; there is: ${known[*]}"
    if [[ $extra == npu ]]; then wanted+=(requirements-npu.txt); else wanted+=("requirements/$extra.txt"); fi
done

mkdir -p .venv
if command -v flock >/dev/null; then
    exec 9<.venv # two commands started at once install one after the other
    flock 9
fi

python=.venv/bin/python
works() { "$python" -c 'import pip' 2>/dev/null; }
if [[ -n ${PYTHON:-} ]] || ! works; then
    chosen=${PYTHON:-python3}
    version=$("$chosen" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        die "'$chosen' is no Python; name one of version 3.10 to 3.12, as in PYTHON=python3.11"
    case $version in
        3.10 | 3.11 | 3.12) ;;
        *) die "'$chosen' is Python $version; it must be 3.10 to 3.12: name another, as in PYTHON=python3.11" ;;
    esac
    if ! works || [[ $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') != "$version" ]]; then
        echo "setup: making .venv with Python $version"
        "$chosen" -m venv --clear .venv || die "'$chosen' cannot make .venv (on Debian: install python3-venv)"
    fi
fi

usual=() # what pip installs as it comes
for file in "${wanted[@]}"; do
    [[ $file == requirements-npu.txt || $file == requirements/clients.txt ]] || usual+=("$file")
done
is_new() { ! sha256sum --check --status ".venv/${1//\//-}.sha256" 2>/dev/null; }
is_wanted() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
done_with() {
    for file in "$@"; do
        sha256sum "$file" >".venv/${file//\//-}.sha256"
    done
}

pip=("$python" -m pip install --disable-pip-version-check --no-input --progress-bar off -qq)
for file in "${usual[@]}"; do
    if is_new "$file"; then
        torch=$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' requirements.txt)
        echo "setup: installing ${usual[*]} (the first time takes some minutes)"
        "${pip[@]}" "$torch" # first, so that nothing else brings another torch
        "${pip[@]}" "${usual[@]/#/--requirement=}"
        done_with "${usual[@]}"
        break
    fi
done

# torch loads torch_npu by itself, and fails where there is no CANN: there it lies where only the virtual NPU looks
if is_wanted requirements-npu.txt; then
    beside=.venv/virtual_npu
    if [[ -n ${ASCEND_HOME_PATH:-}${ASCEND_TOOLKIT_HOME:-} || -d /usr/local/Ascend/ascend-toolkit ]]; then
        if is_new requirements-npu.txt || [[ -d $beside ]]; then
            echo "setup: installing torch_npu"
            "${pip[@]}" --no-deps --requirement=requirements-npu.txt
            rm -rf "$beside"
        fi
    else
        if is_new requirements-npu.txt; then
            echo "setup: installing torch_npu"
            "${pip[@]}" --no-deps --upgrade --target "$beside" --requirement=requirements-npu.txt
        fi
        [[ ! -d $beside ]] || "$python" -m virtual_npu.libraries || die "the virtual NPU has no libraries"
    fi
    done_with requirements-npu.txt
fi

# these clients bring other versions of what .venv pins: theirs lie apart and come first, .venv's behind them
if is_wanted requirements/clients.txt && is_new requirements/clients.txt; then
    apart=.venv/clients
    echo "setup: installing clients into $apart (some minutes)"
    "$python" -m venv --clear "$apart"
    packages() { "$1" -c 'import os, sysconfig; print(os.path.realpath(sysconfig.get_path("purelib")))'; }
    packages "$python" >"$(packages "$apart/bin/python")/behind.pth"
    "$apart/bin/python" "${pip[@]:1}" --requirement=requirements/clients.txt
    "$apart/bin/python" "${pip[@]:1}" --target "$apart/older" --requirement=tests/serving/clients/older.txt
    if command -v npm >/dev/null; then
        cp tests/serving/clients/package.json "$apart"
        npm install --prefix "$apart" --silent --no-audit --no-fund ||
            echo "setup: npm installs nothing; the clients for Node.js are not tried" >&2
    fi
    done_with requirements/clients.txt
fi
