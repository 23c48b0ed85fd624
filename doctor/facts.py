"""Gather what this machine has of an Ascend environment, and define what a check of it reports.

The machine is only read, never changed, and any part may be missing.
"""

from __future__ import annotations

import fcntl
import grp
import json
import locale
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from devices.present import VISIBLE_NPUS as VISIBLE
from devices.present import Chip, chips_of, product_of
from devices.torch_npu_releases import public, releases

CONTROL_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
CANN_PLACES = Path(__file__).parents[1] / "scripts/cann_places.txt"  # shell scripts read it too
ASCEND = "/usr/local/Ascend"
DRIVER = f"{ASCEND}/driver"
# The packages are those with which CANN compiles operators in Python, torch, and torch_npu.
PACKAGES = (
    "torch", "torch_npu", "numpy", "attrs", "cffi", "decorator", "protobuf", "psutil", "pyyaml", "scipy",
    "sympy",
)  # fmt: skip
ASK_TORCH = "import torch; print(torch.__version__)"
ASK_NPU = "import torch, torch_npu; print(torch.npu.device_count())"
# What the library says of itself, which needs no device
ASK_CALLS = (
    "import json, sys; from attention.npu.registered import lacking_here;"
    " from devices.ascend_limits import product; from devices.torch_npu_calls import calls_of;"
    " print(json.dumps(lacking_here(calls_of(product(sys.argv[1], '')))))"
)
PROBE_S = 120
SIOCGIFADDR = 0x8915  # the address of an interface, netdevice(7)


@dataclass(frozen=True, slots=True)
class Node:
    """A device file."""

    path: str
    group: str
    is_usable: bool  # this user may read and write it


@dataclass(frozen=True, slots=True)
class Port:
    """The port of a device to the network between machines, as hccn_tool shows it; None: it shows nothing."""

    device: int
    address: str | None
    link: str | None  # the word "UP" or "DOWN"
    tls: bool | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts of an environment. Versions are text as found; None: not found, or not looked for."""

    system: str
    architecture: str
    python: tuple[int, int]
    glibc: tuple[int, int] | None
    encoding: str
    year: int
    in_container: bool
    is_root: bool
    groups: tuple[str, ...]
    max_open_files: int
    shm_bytes: int | None
    environment: Mapping[str, str]
    driver_version: str | None
    has_npu_smi: bool
    npu_smi_refusal: str | None  # why the system refuses to run it
    npu_smi_error: str | None
    chips: tuple[Chip, ...]
    nodes: tuple[Node, ...]
    absent_control_nodes: tuple[str, ...]
    cann_home: str | None
    cann_version: str | None
    has_kernels: bool
    has_hccl: bool
    nnal_home: str | None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None  # version of CUDA, where torch is built for it
    wheel_glibc: tuple[int, int] | None = None  # the least version that torch_npu's wheel requires
    torch_error: str | None = None  # error of `import torch`
    npu_error: str | None = None  # error of `import torch_npu`
    npu_lacks: tuple[str, ...] | None = None  # what torch_npu lacks of what is called; None: not asked
    num_devices: int | None = None  # number of devices that torch_npu sees
    # IPv4 addresses of the network interfaces of this machine, by name
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    other_cann: tuple[str, ...] = ()  # further places that have a CANN of their own
    closed: tuple[str, ...] = ()  # folders of driver and CANN that this user may not enter
    rank_table_error: str | None = None  # why RANK_TABLE_FILE cannot be read
    ports: tuple[Port, ...] = ()  # the devices' own network, where hccn_tool is there

    def is_visible(self, index: int) -> bool:
        """Return whether the environment leaves this device visible; an invalid list hides none."""
        said = self.environment.get(VISIBLE, "").split(",")
        return not all(each.strip().isdecimal() for each in said) or index in map(int, said)


def gather() -> MachineFacts:
    """Gather the facts of this machine.

    This takes some seconds, since torch is imported in separate processes.
    """
    environment = dict(os.environ)
    home = _cann_home(environment)
    nodes = sorted(Path("/dev").glob("davinci[0-9]*"), key=lambda node: (len(node.name), node.name))
    smi_refusal, smi_error, chips = _npu_smi()
    packages = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    torch_error = _error_of(ASK_TORCH)[0] if "torch" in packages else None
    npu_error, printed = _error_of(ASK_NPU) if "torch_npu" in packages and not torch_error else (None, "")
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        python=(sys.version_info[0], sys.version_info[1]),
        glibc=numbers(platform.libc_ver()[1]),
        encoding=locale.getpreferredencoding(False),
        year=time.gmtime().tm_year,
        in_container=any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
        or bool({"container", "KUBERNETES_SERVICE_HOST"} & set(environment)),
        is_root=os.geteuid() == 0,
        groups=tuple(_group(number) for number in sorted({os.getegid(), *os.getgroups()})),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        environment=environment,
        driver_version=driver_version(),
        has_npu_smi=shutil.which("npu-smi") is not None,
        npu_smi_refusal=smi_refusal,
        npu_smi_error=smi_error,
        chips=chips,
        nodes=tuple(
            Node(str(each), _group(each.stat().st_gid), os.access(each, os.R_OK | os.W_OK)) for each in nodes
        ),
        absent_control_nodes=tuple(each for each in CONTROL_NODES if not os.path.exists(each)),
        cann_home=home,
        cann_version=_cann_version(Path(home)) if home else None,
        other_cann=_other_cann(environment, home),
        has_kernels=bool(home) and _has_kernels(Path(home or "")),
        has_hccl=home is not None and any(Path(home).glob("**/lib64/libhccl.so")),
        nnal_home=_nnal_home(environment),
        packages=packages,
        torch_cuda=_torch_cuda(),
        wheel_glibc=_wheel_glibc("torch_npu"),
        torch_error=torch_error,
        npu_error=npu_error,
        npu_lacks=_npu_lacks(packages["torch_npu"], chips) if printed else None,
        num_devices=int(printed) if printed.isdecimal() else None,
        interfaces=_interfaces(),
        closed=_closed((DRIVER, *_said_places(environment), *_cann_places(environment))),
        rank_table_error=_rank_table_error(environment.get("RANK_TABLE_FILE")),
        ports=_ports(nodes),
    )


def numbers(version: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version: 8.3.RC1 is (8, 3)."""
    parts = re.match(r"\D*(\d+)\.(\d+)", version or "")
    return (int(parts[1]), int(parts[2])) if parts else None


def _npu_smi() -> tuple[str | None, str | None, tuple[Chip, ...]]:
    """Return why npu-smi cannot be run, the error of a run that fails, and the chips that it shows."""
    if shutil.which("npu-smi") is None:
        return None, None, ()
    try:
        status, printed, errors = _run("npu-smi", "info")
    except subprocess.TimeoutExpired:
        return None, f"no answer in {PROBE_S} s", ()
    except OSError as error:
        return error.strerror, None, ()
    printed += errors
    return None, None if status == 0 else _last_line(printed) or f"ended by {status}", chips_of(printed)


def _error_of(code: str, *arguments: str) -> tuple[str | None, str]:
    """Return the last line of a program's error, or None if it succeeds, and the last line it prints."""
    try:
        status, printed, errors = _run(sys.executable, "-c", code, *arguments)
    except subprocess.TimeoutExpired:
        return f"no answer in {PROBE_S} s", ""
    except OSError as error:
        return str(error), ""
    if status == 0:
        return None, _last_line(printed)
    return _reason(errors) or f"ended by {status}", ""


def _run(*command: str) -> tuple[int, str, str]:
    """Return status, output and errors; bytes that cannot be decoded, as of messages in GBK, are replaced."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=PROBE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def _reason(text: str) -> str:
    """Return the line of a traceback that gives the reason; some libraries write more after it."""
    raised = [line for line in text.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return (raised[-1] if raised else _last_line(text))[:500]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _npu_lacks(version: str, chips: Sequence[Chip]) -> tuple[str, ...] | None:
    """Ask a torch_npu whose version is in no table here what it lacks; None where it gives no answer."""
    if public(version) in releases():
        return None
    name = next((known for chip in chips if (known := product_of(chip.name))), "910B")
    printed = _error_of(ASK_CALLS, name)[1]
    return tuple(json.loads(printed)) if printed.startswith("[") else None


def _interfaces() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 address of each network interface; the system tells one of each."""
    found: dict[str, tuple[str, ...]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = (socket.inet_ntoa(answer[20:24]),)
            except OSError:  # it has none
                found[name] = ()
    return found


def _rank_table_error(place: str | None) -> str | None:
    """Return why the table of ranks cannot be read, None where it can or none is named."""
    if not place:
        return None
    try:
        table = json.loads(Path(place).read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror
    except ValueError as error:
        return f"it is not JSON: {error}"
    return None if isinstance(table, dict) and "server_list" in table else "it has no server_list"


def _hccn_tool() -> str | None:
    """Return the driver's tool for the devices' own network."""
    places = (shutil.which("hccn_tool"), f"{DRIVER}/tools/hccn_tool")
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def _ports(nodes: Sequence[Path]) -> tuple[Port, ...]:
    """Return the ports of the devices of these files, which have the host's numbers in a container too."""
    found = [re.fullmatch(r"davinci(\d+)", node.name) for node in nodes]
    tool = _hccn_tool()
    return () if tool is None else tuple(_port(tool, int(each[1])) for each in found if each)


def _port(tool: str, device: int) -> Port:
    """Ask the tool for address, link and TLS switch of one device."""

    def answer(option: str, pattern: str) -> str | None:
        try:
            status, printed, _ = _run(tool, "-i", str(device), option, "-g")
        except (OSError, subprocess.TimeoutExpired):  # shown as unknown
            return None
        found = re.search(pattern, printed) if status == 0 else None
        return found[1] if found else None

    tls = answer("-tls", r"tls switch\[(\d)\]")
    return Port(
        device,
        answer("-ip", r"ipaddr:\s*([\d.]+)"),
        answer("-link", r"link status:\s*(\w+)"),
        None if tls is None else tls == "1",
    )


def driver_version() -> str | None:
    """Return the version of the driver, None where none is found."""
    places = [Path(DRIVER) / "version.info"]
    said = _field(Path("/etc/ascend_install.info"), "Driver_Install_Path_Param")
    if said:
        places.append(Path(said) / "driver/version.info")
    return next((version for place in places if (version := _field(place, "Version"))), None)


def _field(path: Path, name: str) -> str | None:
    """Return the value of a name, in any case, from a file of NAME=VALUE lines."""
    if not os.path.isfile(path) or not os.access(path, os.R_OK):  # Path.is_file raises in a closed folder
        return None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == name.lower():
            return value.strip().strip("[]\"'") or None
    return None


def _cann_home(environment: Mapping[str, str]) -> str | None:
    """Return the folder that a variable names, or else the first place that has CANN."""
    said = filter(os.path.isdir, _said_places(environment))
    return next(said, None) or next(filter(_has_set_env, _cann_places(environment)), None)


def _nnal_home(environment: Mapping[str, str]) -> str | None:
    """Return the first of the folders where scripts/launch.sh looks for NNAL that is there."""
    places = f"{environment.get('ASCEND') or ASCEND}/nnal", os.path.expanduser("~/Ascend/nnal")
    return next(filter(os.path.isdir, places), None)


def _other_cann(environment: Mapping[str, str], home: str | None) -> tuple[str, ...]:
    """Return the places of other CANN than the one in use; several names may lead to one folder."""
    found = {os.path.realpath(place): place for place in _cann_places(environment) if _has_set_env(place)}
    return tuple(place for folder, place in found.items() if folder != os.path.realpath(home or ""))


def _said_places(environment: Mapping[str, str]) -> list[str]:
    names = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
    return [place for name in names if (place := environment.get(name))]


def _cann_places(environment: Mapping[str, str]) -> list[str]:
    """Return where CANN may lie, the place that is preferred first."""
    ascend = environment.get("ASCEND") or ASCEND
    known = [line for line in CANN_PLACES.read_text(encoding="utf-8").split("\n") if line and line[0] != "#"]
    return [os.path.expanduser(line.replace("ASCEND/", f"{ascend}/", 1)) for line in known]


def _has_set_env(place: str) -> bool:
    lies_in = place, place.removesuffix("/latest")
    return os.path.isdir(place) and any(os.path.isfile(f"{each}/set_env.sh") for each in lies_in)


def _closed(places: Sequence[str]) -> tuple[str, ...]:
    """Return the folders on the way to these places that are there, and that this user may not enter."""
    folders = dict.fromkeys(str(each) for place in places for each in (Path(place), *Path(place).parents))
    return tuple(each for each in folders if os.path.isdir(each) and not os.access(each, os.X_OK))


def _cann_version(home: Path) -> str | None:
    places = [*sorted(home.glob("*-linux/ascend_*_install.info")), home / "version.info"]
    return next((version for place in places if (version := _field(place, "version"))), None)


def _has_kernels(home: Path) -> bool:
    return any(home.glob("opp/built-in/op_impl/ai_core/tbe/kernel/*"))


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Read the version of CUDA from torch's own file, since importing torch may be what fails."""
    if _version("torch") is None:
        return None
    file = Path(str(distribution("torch").locate_file("torch/version.py")))
    found = (
        re.search(r"^cuda(?::[^=]*)?\s*=\s*'([^']+)'", file.read_text(), re.MULTILINE)
        if file.is_file()
        else None
    )
    return found[1] if found else None


def _wheel_glibc(name: str) -> tuple[int, int] | None:
    if _version(name) is None:
        return None
    found = re.search(r"manylinux_(\d+)_(\d+)", distribution(name).read_text("WHEEL") or "")
    return (int(found[1]), int(found[2])) if found else None


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, its cause, its fix, and the document that says so; one that is not fatal is advice."""

    problem: str
    cause: str
    fix: str
    source: str
    is_fatal: bool = True


Check = Callable[[MachineFacts], Finding | None]  # None: the check found no fault
