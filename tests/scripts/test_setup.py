"""scripts/setup.sh makes `.venv` over the packages of an image, and leaves those as they are.

The images here are made up: environments with packages that have a name and a version, and nothing else. The
packages to install come from a folder of such wheels, so that no index is asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT

# What of the tree setup.sh reads
READ = ("scripts/setup.sh", "scripts/cann.sh", "scripts/cann_places.txt", "devices", "borders")


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of a package with one empty module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """A shell in which pip installs the wheels of this test alone, and CANN is not found but by `more`."""
    dropped = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    return kept | own | {"ASCEND": str(tmp_path / "none"), "HOME": str(tmp_path)} | more


def image(tmp_path: Path, **packages: str) -> Path:
    """The Python of an image that has these packages."""
    folder = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    apart = tmp_path / "of-the-image"
    apart.mkdir()
    wheels = [wheel(apart, name, version) for name, version in packages.items()]
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "install", "--no-deps", "--quiet", *wheels]
    subprocess.run(pip, check=True, env=environment(tmp_path))
    return python


def tree(tmp_path: Path) -> Path:
    """The part of the tree that setup.sh reads, with requirements that are as small as the test's wheels."""
    root = tmp_path / "tree"
    for name in READ:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, root / name)
    (root / "requirements").mkdir()
    for name in ("npu-2.10", "npu-2.9"):
        shutil.copy(ROOT / f"requirements/{name}.txt", root / "requirements")
    (root / "requirements.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    (root / "requirements-npu.txt").write_text("torch-npu==2.13.0\nscipy==1.17.1\n")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, version in (
        *(("torch", version) for version in ("2.13.0", "2.13.0+cpu", "2.10.0", "2.10.0+cpu", "2.9.0+cpu")),
        *(("torch_npu", version) for version in ("2.13.0", "2.10.0.post4", "2.9.0.post2")),
        *(("numpy", "2.4.6"), ("scipy", "1.17.1")),
    ):
        wheel(wheels, name, version)
    cann = tmp_path / "Ascend/cann"
    cann.mkdir(parents=True)
    (cann / "set_env.sh").touch()
    return root


def run(tmp_path: Path, *extras: str, **more: str) -> str:
    """What setup.sh says."""
    command = ["bash", tmp_path / "tree/scripts/setup.sh", *extras]
    shell = environment(tmp_path, **more)
    done = subprocess.run(command, capture_output=True, text=True, env=shell, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def freeze(python: Path) -> list[str]:
    """What a Python's environment holds."""
    code = "import sysconfig, os; print(*sorted(os.listdir(sysconfig.get_path('purelib'))))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def seen(python: Path, *names: str) -> list[str]:
    """The versions of packages that a Python finds."""
    code = f"from importlib.metadata import version as v; print(*map(v, {names!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


OLD = {"numpy": "1.26.4", "click": "8.0"}


@pytest.mark.slow
def test_an_image_whose_torch_npu_fits_keeps_its_packages(tmp_path: Path) -> None:
    python = image(tmp_path, torch="2.10.0+cpu", torch_npu="2.10.0.post4", **OLD)
    own = tree(tmp_path) / ".venv/bin/python"
    before = freeze(python)
    shell = {"PYTHON": str(python), "ASCEND": str(tmp_path / "Ascend")}
    said = run(tmp_path, "npu", **shell)
    assert f"torch 2.10.0+cpu and torch_npu 2.10.0.post4 are those of {tmp_path}/image" in said
    assert freeze(python) == before
    versions = ["2.10.0+cpu", "2.10.0.post4", "2.4.6", "1.17.1", "8.0"]
    names = ("torch", "torch_npu", "numpy", "scipy", "click")
    assert seen(own, *names) == versions
    settings = (own.parents[1] / "pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in settings
    # A second call without npu, and one from within the environment leave all as it is
    path = f"{own.parent}:{os.environ['PATH']}"
    for extras, more in (([], {}), (["npu"], {"PATH": path, "ASCEND": shell["ASCEND"]})):
        assert "installing" not in run(tmp_path, *extras, **more)
        assert seen(own, *names) == versions
    own.unlink()  # as where the image's Python was replaced
    own.symlink_to(tmp_path / "gone")
    assert f"torch_npu 2.10.0.post4 are those of {tmp_path}/image" in run(tmp_path, **shell)
    assert seen(own, *names) == versions
    assert freeze(python) == before


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "older"), [("x86_64", "2.10.0+cpu"), ("aarch64", "2.10.0")])
def test_an_image_whose_torch_npu_is_too_old_is_left_alone(machine: str, older: str, tmp_path: Path) -> None:
    uname = tmp_path / "bin/uname"
    uname.parent.mkdir()
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    python = image(tmp_path, torch="2.9.0+cpu", torch_npu="2.9.0", **OLD)
    own = tree(tmp_path) / ".venv/bin/python"
    before = freeze(python)
    path = f"{uname.parent}:{os.environ['PATH']}"
    shell = {"PYTHON": str(python), "ASCEND": str(tmp_path / "Ascend"), "PATH": path}
    said = run(tmp_path, "npu", **shell)
    assert "torch_npu 2.9.0 of " in said
    assert "does not fit this project: the argument cache_mode of npu_scatter_pa_kv_cache" in said
    assert seen(own, "torch", "torch_npu", "numpy") == ["2.13.0+cpu", "2.13.0", "2.4.6"]
    asked = own.parents[1] / "torch.txt"  # of two builds pip itself prefers that for the CPU
    assert asked.read_text() == "torch==2.13.0+cpu\n"
    assert not (own.parents[1] / "virtual_npu").exists()
    # Another release in its place, which a later call without npu keeps
    run(tmp_path, "npu-2.10", **shell)
    run(tmp_path, PATH=path)
    assert asked.read_text() == f"torch=={older}\n"
    assert [each.partition("+")[0] for each in seen(own, "torch", "torch_npu")] == ["2.10.0", "2.10.0.post4"]
    assert freeze(python) == before


@pytest.mark.slow
def test_npu_after_another_extra_replaces_torch_and_stays(tmp_path: Path) -> None:
    """Plain torch, as PyPI has it, gives way to the build for CPUs; both packages follow their pins then."""
    root, shell = tree(tmp_path), {"ASCEND": str(tmp_path / "Ascend")}
    own = root / ".venv/bin/python"
    for path in (tmp_path / "wheels").glob("torch-*+cpu-*"):
        path.unlink()
    run(tmp_path, **shell)
    assert seen(own, "torch") == ["2.13.0"]
    with pytest.raises(AssertionError, match=r"pip finds no torch==2.13.0\+cpu"):
        run(tmp_path, "npu", **shell)
    assert run(tmp_path, **shell) == "", "what could not be installed is not kept"
    for version in ("2.13.0+cpu", "2.10.0+cpu"):
        wheel(tmp_path / "wheels", "torch", version)
    run(tmp_path, "npu", **shell)
    assert seen(own, "torch", "torch_npu") == ["2.13.0+cpu", "2.13.0"]
    assert run(tmp_path, **shell) == ""
    assert run(tmp_path, "npu", **shell) == ""
    for name, package, version in (
        ("requirements.txt", "torch", "2.10.0"),
        ("requirements-npu.txt", "torch-npu", "2.10.0.post4"),
    ):
        text = (root / name).read_text()
        (root / name).write_text(text.replace(f"{package}==2.13.0", f"{package}=={version}"))
    run(tmp_path, **shell)
    assert seen(own, "torch", "torch_npu") == ["2.10.0+cpu", "2.10.0.post4"]


@pytest.mark.parametrize("extras", [("npu", "npu-2.9"), ("npu-2.8",)])
def test_what_cannot_be_installed_is_refused(extras: tuple[str, ...], tmp_path: Path) -> None:
    tree(tmp_path)
    command = ["bash", tmp_path / "tree/scripts/setup.sh", *extras]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), check=False)
    assert done.returncode == 1
    wanted = "install different releases" if len(extras) > 1 else "there is: npu bench"
    assert done.stderr.startswith("setup: ")
    assert wanted.partition("bench")[0] in done.stderr
    assert not (tmp_path / "tree/.venv").exists()
