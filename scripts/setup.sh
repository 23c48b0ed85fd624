#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements into it; when nothing has changed, does nothing.
#
#   bash scripts/setup.sh [EXTRA ...]     an EXTRA is a requirements/EXTRA.txt, or npu (requirements-npu.txt)
#   PYTHON=python3.12 bash scripts/setup.sh
#
# In an image whose Python has a torch_npu that fits this project, npu makes .venv over its packages: torch and
# torch_npu are the image's, and nothing of the image is changed. npu-2.10 and npu-2.9 install these releases. Later
# calls keep the choice of npu, npu-2.10 or npu-2.9 without naming it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "setup: $*" >&2
    exit 1
}

known=()
for file in requirements-npu.txt requirements/*.txt; do
    file=${file##*/}
    file=${file#requirements-}
    known+=("${file%.txt}")
done
wanted=(requirements.txt) npu=
for extra in "$@"; do
    [[ " ${known[*]} " == *" $extra "* ]] || die "there is no extra '$extra'; there is: ${known[*]}"
    case $extra in
        npu | npu-*)
            [[ -z $npu ]] || die "'$npu' and '$extra' install different releases of torch_npu; give one"
            npu=$extra
            wanted+=(requirements-npu.txt)
            ;;
        *) wanted+=("requirements/$extra.txt") ;;
    esac
done
# shellcheck source=scripts/cann.sh
source scripts/cann.sh
cann=$(cann_home) || cann=

mkdir -p .venv
if command -v flock >/dev/null; then
    exec 9<.venv # two commands started at once install one after the other
    flock 9
fi

python=.venv/bin/python
works() { "$python" -c 'import pip' 2>/dev/null; }
# The versions of torch and torch_npu that a Python has, where both are there
pair() {
    "$1" -c 'from importlib.metadata import version as v; print(v("torch"), v("torch_npu"))' 2>/dev/null
}
chosen=${PYTHON:-python3} over=()
before=$(cat .venv/npu 2>/dev/null) || before=
is_kept=
if [[ -z $npu && -n $before ]]; then # what an earlier call chose stays, and its torch_npu is that of its torch
    npu=$before is_kept=yes
    if [[ $npu == image ]] && ! works; then # the image has another Python now, which is looked at as if npu were asked for
        npu=npu is_kept=
    fi
    [[ $npu == image ]] || wanted+=(requirements-npu.txt)
fi
prefix=$("$chosen" -c 'import sys; print(sys.prefix)' 2>/dev/null) || prefix=
if [[ $before == image && ($npu == npu || $npu == image) ]] && works; then
    npu=image
    found=$(pair "$python") || die "torch or torch_npu is no longer in the image; remove .venv and set it up anew"
elif [[ $npu == npu && -z $is_kept && -n $cann && $prefix != "$PWD/.venv" ]] && found=$(pair "$chosen"); then
    if lacks=$("$chosen" -m devices.torch_npu_releases "${found#* }"); then
        echo "setup: torch ${found% *} and torch_npu ${found#* } are those of $prefix, which stays as it is"
        npu=image over=(--system-site-packages)
        rm -f "$python"
    else
        echo "setup: torch_npu ${found#* } of $prefix does not fit this project: $lacks" >&2
    fi
fi
if [[ -n ${PYTHON:-} ]] || ! works; then
    version=$("$chosen" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        die "'$chosen' is no Python; name one of version 3.10 to 3.12, as in PYTHON=python3.11"
    case $version in
        3.10 | 3.11 | 3.12) ;;
        *) die "'$chosen' is Python $version; it must be 3.10 to 3.12: name another, as in PYTHON=python3.11" ;;
    esac
    if ! works || [[ $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') != "$version" ]]; then
        echo "setup: making .venv with Python $version"
        "$chosen" -m venv --clear "${over[@]}" .venv || die "'$chosen' cannot make .venv (on Debian: install python3-venv)"
    fi
fi

if [[ $npu == image ]]; then
    echo image >.venv/npu
    torch="torch==${found% *}"
    if [[ $(pair "$python") != "$found" ]]; then # a Python that is an environment itself does not hand its own on
        "$chosen" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
            >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/image.pth"
    fi
else
    pins=requirements.txt
    [[ $npu != npu-* ]] || pins=requirements/$npu.txt
    torch=$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' "$pins")
    # torch_npu does not load beside a torch for CUDA, which plain torch is, but for 2.10 and 2.9 on aarch64
    if [[ -n $cann && -n $npu ]] && [[ $(uname -m) == x86_64 || $npu != npu-* ]]; then
        torch+=+cpu
    fi
fi

usual=() # what pip installs as it comes
for file in "${wanted[@]}"; do
    case $file in
        requirements-npu.txt | requirements/clients.txt | requirements/vllm.txt) ;;
        *) usual+=("$file") ;;
    esac
done
is_new() { ! sha256sum --check --status ".venv/${1//\//-}.sha256" 2>/dev/null; }
is_wanted() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
done_with() {
    for file in "$@"; do
        sha256sum "$file" >".venv/${file//\//-}.sha256"
    done
}

pip=("$python" -m pip install --disable-pip-version-check --no-input --progress-bar off -qq)
# pip takes a build for CPUs that is there for plain torch, too, as an index without CUDA has no other
has_torch() { [[ $(cat .venv/torch.txt 2>/dev/null) =~ ^"$torch"(\+cpu)?$ ]]; }
install_torch() { # first, so that nothing else brings another torch
    [[ $npu != image ]] || return 0
    if [[ $torch == *+cpu ]]; then
        "${pip[@]}" "$torch" --extra-index-url "$cpu_index" ||
            die "pip finds no $torch: pip install $torch --index-url $cpu_index"
    else
        "${pip[@]}" "$torch"
    fi
}
cpu_index=https://download.pytorch.org/whl/cpu
for file in "${usual[@]}"; do
    if is_new "$file" || ! has_torch; then
        echo "setup: installing ${usual[*]} (the first time takes some minutes)"
        install_torch
        sed '/^torch==/d' requirements.txt >.venv/requirements.txt
        echo "$torch" >.venv/torch.txt
        from=("${usual[@]/#/--requirement=}")
        "${pip[@]}" --constraint=.venv/torch.txt "${from[@]/%=requirements.txt/=.venv/requirements.txt}"
        done_with "${usual[@]}"
        break
    fi
done

# torch loads torch_npu by itself, and fails where there is no CANN: there it lies where only the virtual NPU looks
if is_wanted requirements-npu.txt; then
    beside=.venv/virtual_npu releases=requirements-npu.txt
    [[ $npu != npu-* ]] || releases=requirements/$npu.txt
    torch_npu=$(sed -n 's/^\(torch-npu==[^ ;#]*\).*/\1/p' "$releases")
    is_other() { is_new requirements-npu.txt || [[ $(cat .venv/torch_npu.txt 2>/dev/null) != "$npu $torch_npu" ]]; }
    if [[ -n $cann ]]; then
        if is_other || [[ -d $beside ]]; then
            echo "setup: installing what CANN and torch_npu need"
            sed '/^torch-npu==/d' requirements-npu.txt >.venv/requirements-npu.txt
            "${pip[@]}" --constraint=.venv/torch.txt --requirement=.venv/requirements-npu.txt
            [[ $npu == image ]] || "${pip[@]}" --no-deps "$torch_npu"
            rm -rf "$beside"
        fi
    else
        if is_other; then
            echo "setup: installing torch_npu"
            "${pip[@]}" --no-deps --upgrade --target "$beside" "$torch_npu"
        fi
        [[ ! -d $beside ]] || "$python" -m virtual_npu.libraries || die "the virtual NPU has no libraries"
    fi
    done_with requirements-npu.txt
    echo "$npu $torch_npu" >.venv/torch_npu.txt
    [[ $npu == image ]] || echo "$npu" >.venv/npu # now that it is there: what cannot be installed is not kept
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

# vLLM pins other versions of what .venv pins and sees nothing of it; the servers of both are asked by one client
if is_wanted requirements/vllm.txt && is_new requirements/vllm.txt; then
    apart=.venv/vllm
    [[ $("$python" -c 'import sys; print(sys.version_info >= (3, 11))') == True ]] ||
        die "vLLM needs Python 3.11 or 3.12; set up .venv with it, as in PYTHON=python3.11"
    echo "setup: installing vLLM into $apart (some minutes)"
    "$python" -m venv --clear "$apart"
    # PyPI has no build of torch that is for CPUs alone; some machines have one beside it, the others ask its makers
    "$apart/bin/python" "${pip[@]:1}" --requirement=requirements/vllm.txt ||
        "$apart/bin/python" "${pip[@]:1}" --requirement=requirements/vllm.txt --extra-index-url "$cpu_index" ||
        die "pip cannot install requirements/vllm.txt, whose torch is at $cpu_index"
    # what it brings for pictures and sound may be built for CUDA, and does not load beside this torch; text needs none
    "$apart/bin/python" -m pip uninstall --yes -qq torchvision torchaudio torchcodec
    done_with requirements/vllm.txt
fi
