"""A launch sets the environment that each device needs, and leaves what the user has set."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from benchmark.verbs import BENCHMARKS, SIMULATIONS
from recipes.schema.command_line import FLAGS, positionals
from recipes.schema.recipe import ROOT

CPU = "recipes/tiny/cpu.yaml"
NPU = "recipes/qwen3/qwen3_8b_910b.yaml"
SETTINGS = (
    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    "TASK_QUEUE_ENABLE=1",
    "HCCL_OP_EXPANSION_MODE=AIV",
)


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    home = {"HOME": "/nonexistent", "MODELS": "/models", "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "scripts/launch.sh", *arguments],
        cwd=ROOT, env=kept | home | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def ascend(tmp_path: Path) -> str:
    """An installation of CANN and NNAL, as far as a launch looks at it."""
    for name, script in {
        "cann": "export ASCEND_HOME_PATH=there; echo $IS_UNSET; false",  # theirs are as careless
        "nnal/atb": "export ATB_HOME_PATH=$ASCEND_HOME_PATH/atb",
    }.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set_env.sh").write_text(script + "\n")
    return str(tmp_path)


def test_a_verb_runs_with_its_arguments(tmp_path: Path) -> None:
    lengths = ["--prompt-tokens", "3", "--output-tokens", "2", "--vocab-size", "9"]
    done = launch("trace", "--requests", "2", *lengths, "--output", str(tmp_path / "a b.jsonl"))
    assert done.returncode == 0
    assert done.stdout.startswith("2 requests in ")
    assert len((tmp_path / "a b.jsonl").read_text().splitlines()) == 2


def test_a_cpu_gets_nothing_of_ascend() -> None:
    done = launch("--dry-run", "generate", "recipes/tiny/cpu.yaml", "--prompt", "12+7=")
    assert (done.returncode, done.stdout) == (0, "")
    assert "Ascend" not in done.stderr
    assert "HCCL" not in done.stderr
    has_openmp = (Path(sys.prefix) / "lib/libiomp5.so").exists()
    assert ("libiomp5.so" in done.stderr) == has_openmp


def test_an_npu_gets_its_environment_and_a_dry_run_runs_nothing(ascend: str) -> None:
    done = launch("--dry-run", "generate", NPU, "--prompt", "a b=c", ASCEND=ascend)
    assert done.returncode == 0
    assert "libiomp5" not in done.stderr
    for name in ("cann", "nnal/atb"):
        assert f"launch: sourced {ascend}/{name}/set_env.sh" in done.stderr
    for setting in SETTINGS:
        assert f"launch: {setting}" in done.stderr
    assert f"'-m' 'scripts.generate' '{NPU}' '--prompt' 'a b=c'" in done.stderr


@pytest.mark.parametrize(
    ("machine", "is_bound"), [("aarch64", True), pytest.param("x86_64", False, marks=pytest.mark.slow)]
)
def test_threads_are_bound_where_sockets_are_many(
    ascend: str, tmp_path: Path, machine: str, is_bound: bool
) -> None:
    uname = tmp_path / "bin/uname"
    uname.parent.mkdir()
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    path = f"{uname.parent}:{os.environ['PATH']}"
    done = launch("--dry-run", "generate", NPU, ASCEND=ascend, PATH=path)
    assert done.returncode == 0
    assert ("launch: CPU_AFFINITY_CONF=1,npu_affine:1,bind_irq:0" in done.stderr) == is_bound


def test_the_libgomp_of_an_images_torch_is_loaded_first_on_aarch64(ascend: str, tmp_path: Path) -> None:
    """A .venv over an image's Python reads its packages by a file of paths, as scripts/setup.sh writes it."""
    image, uname = tmp_path / "image", tmp_path / "bin/uname"
    library = image / "torch.libs/libgomp-x.so.1"
    for path, text in {
        library: "",
        image / "torch/__init__.py": "raise ImportError",
        uname: "#!/bin/sh\necho aarch64\n",
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(text)
    uname.chmod(0o755)
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
    (site / "image.pth").write_text(f"{image}\n{sysconfig.get_path('purelib')}\n")
    python, path = f"{tmp_path}/venv/bin/python", f"{uname.parent}:{os.environ['PATH']}"
    done = launch("--dry-run", "generate", NPU, ASCEND=ascend, PATH=path, PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert f"launch: LD_PRELOAD has {library}" in done.stderr


@pytest.mark.parametrize(("by", "python"), [("ASCEND", sys.executable), ("HOME", "python3")])
def test_nnal_is_sourced_by_the_python_that_is_launched(by: str, python: str, tmp_path: Path) -> None:
    """NNAL's file asks python3 for torch's ABI; a user's own installation lies in ~/Ascend."""
    ascend = tmp_path / "Ascend"
    code = "import os, sys; print(sys.executable, os.getenv('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    for name, script in {"cann": "", "nnal/atb": f'echo "$(python3 -c "{code}")" >&2'}.items():
        (ascend / name).mkdir(parents=True)
        (ascend / name / "set_env.sh").write_text(script + "\n")
    named = {"ASCEND": "/nonexistent", by: str(ascend if by == "ASCEND" else tmp_path)}
    path = "/usr/bin:/bin" if python == sys.executable else f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = launch("--dry-run", "generate", NPU, **named, PATH=path, PYTHON=python)
    assert done.returncode == 0, done.stderr
    assert f"{Path(sys.executable).with_name(Path(python).name)} 0\n" in done.stderr
    assert f"launch: sourced {ascend}/nnal/atb/set_env.sh" in done.stderr


def test_a_model_is_fitted_without_torch_npu_since_cann_is_not_sourced_yet(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
[ "$2 $TORCH_DEVICE_BACKEND_AUTOLOAD" != "recipes.fitting " ] || {{ echo no CANN >&2; exit 1; }}
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    done = launch("--dry-run", "generate", CPU, PYTHON=str(python))
    assert done.returncode == 0, done.stderr


def test_a_cpu_beside_cann_loads_no_torch_npu(ascend: str) -> None:
    for arguments, is_set in (([CPU], True), (["--help"], False)):
        done = launch("--dry-run", "generate", *arguments, ASCEND=ascend)
        assert ("launch: TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr) == is_set, done.stderr


def test_what_the_user_set_stays(ascend: str) -> None:
    set_by_user = {"ASCEND_TOOLKIT_HOME": "/mine", "TASK_QUEUE_ENABLE": "2"}
    done = launch("--dry-run", "generate", NPU, ASCEND=ascend, **set_by_user)
    assert done.returncode == 0
    assert "cann/set_env.sh" not in done.stderr
    assert "TASK_QUEUE_ENABLE" not in done.stderr


def test_a_stand_in_needs_no_cann() -> None:
    done = launch("--dry-run", "generate", NPU, "device.virtual=true", ASCEND="/nonexistent")
    assert done.returncode == 0
    assert "set_env.sh" not in done.stderr


def test_a_value_of_an_option_is_no_recipe() -> None:
    done = launch("--dry-run", "generate", "--output", "x.yml", CPU, "--prompt", "device.kind=npu")
    assert done.returncode == 0, done.stderr
    assert "CANN" not in done.stderr


def test_what_is_an_option_and_what_is_a_value() -> None:
    assert positionals(["a", "--x", "b", "c", "--x=d", "--json", "e", "-", "--", "--f"]) == [
        "a", "c", "e", "-", "--f",
    ]  # fmt: skip
    assert positionals(["route", "--recipe", CPU, "a.b=c", "--port", "1"]) == ["route", CPU, "a.b=c"]
    assert positionals(["--last"]) == []


def test_all_options_without_a_value_are_known() -> None:
    found = {
        argument.value
        for room in ("scripts", "benchmark", "recipes/schema")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and any(ast.unparse(each) == "action='store_true'" for each in node.keywords)
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    found |= {
        each.flag
        for verb in (*BENCHMARKS, *SIMULATIONS)
        for each in verb.options
        if each.given.get("action") == "store_true"
    }
    found |= {f"--{verb.mode}" for verb in BENCHMARKS if verb.mode}
    assert {"--once", "--skip-bad", "--overload"} <= found
    assert found <= FLAGS
    with_values = {each.flag for verb in (*BENCHMARKS, *SIMULATIONS) for each in verb.options} - found
    assert not with_values & FLAGS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", NPU], "CANN and its set_env.sh are not in /nonexistent or ~/Ascend; install it"),
        (["nothing", NPU], "there is no scripts/nothing.py"),
        (["generate"], "say what to run"),
        (["generate", "recipes/none.yaml"], "recipes/none.yaml"),
        (["generate", "recipes/tiny/cpu.yaml", "cache.page_sise=3"], "did you mean cache.page_size"),
    ],
)
def test_what_cannot_be_launched_is_one_line(arguments: list[str], words: str) -> None:
    done = launch("--dry-run", *arguments, ASCEND="/nonexistent")
    assert done.returncode == 2
    assert words in done.stderr
    lines = [line for line in done.stderr.splitlines() if "LD_PRELOAD" not in line]
    assert len(lines) == 1


TWO = ("parallel.tensor=2", "parallel.nodes=[10.0.0.1,10.0.0.2]")


def test_the_first_machine_leads_and_the_second_follows() -> None:
    asked = ["--dry-run", "serve", CPU, "--port", "1", "--profile", "low_latency", *TWO]
    leads, follows = (launch(*asked, NODE_RANK=node).stderr for node in "01")
    assert "'-m' 'scripts.serve' 'recipes/tiny/cpu.yaml' '--port' '1' '--profile' 'low_latency'" in leads
    for each in (CPU, *TWO, "--profile=low_latency"):
        assert f"'{each}'" in follows
    assert "'-m' 'scripts.follow'" in follows
    assert "--port" not in follows
    table = leads.splitlines()[-3:]
    assert table == follows.splitlines()[-3:]
    assert table[0] == "2 ranks, placed by parallel.nodes"


def test_a_python_that_is_not_there_is_named() -> None:
    done = launch("generate", "recipes/tiny/cpu.yaml", PYTHON="/nonexistent/python")
    assert done.returncode == 2
    assert done.stderr == (
        "launch: there is no Python at /nonexistent/python; run bash scripts/setup.sh, or set PYTHON=...\n"
    )
