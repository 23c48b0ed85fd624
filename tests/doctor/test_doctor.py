"""Each fault of an Ascend environment is told by the check that is for it, and a sound one by none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.present import Chip, chips_of
from doctor.diagnosis import CHECKS, diagnose, in_json, in_words, name_of
from doctor.facts import (
    MachineFacts,
    Node,
    Port,
    _cann_home,
    _closed,
    _error_of,
    _field,
    _nnal_home,
    _npu_lacks,
    _other_cann,
    _ports,
    _rank_table_error,
    gather,
    numbers,
)
from recipes.schema.recipe import ROOT
from scripts.doctor import main
from tests.each_of import each_of

HOME = "/usr/local/Ascend/ascend-toolkit/latest"
NEEDS = ("attrs", "cffi", "decorator", "protobuf", "psutil", "pyyaml", "scipy", "sympy")
BOUND = {"CPU_AFFINITY_CONF": "1,npu_affine:1,bind_irq:0"}
FIT = MachineFacts(
    system="Linux",
    architecture="aarch64",
    python=(3, 11),
    glibc=(2, 35),
    encoding="UTF-8",
    year=2026,
    in_container=True,
    is_root=False,
    groups=("users", "HwHiAiUser"),
    max_open_files=65536,
    shm_bytes=2**34,
    environment={"ASCEND_TOOLKIT_HOME": HOME, "http_proxy": "http://p:1", "no_proxy": "localhost"} | BOUND,
    driver_version="25.5.2",
    has_npu_smi=True,
    npu_smi_refusal=None,
    npu_smi_error=None,
    chips=(Chip("910B1", "OK", 3200, 65536), Chip("910B1", "OK", 60000, 65536)),
    nodes=(Node("/dev/davinci0", "HwHiAiUser", True), Node("/dev/davinci1", "HwHiAiUser", True)),
    absent_control_nodes=(),
    cann_home=HOME,
    cann_version="9.0.0",
    has_kernels=True,
    has_hccl=True,
    nnal_home="/usr/local/Ascend/nnal",
    packages={"torch": "2.9.0+cpu", "torch_npu": "2.9.0.post2", "numpy": "2.4"} | dict.fromkeys(NEEDS, "1"),
    wheel_glibc=(2, 28),
    num_devices=2,
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.9",), "eth1": ()},
    ports=(Port(0, "10.0.0.1", "UP", False), Port(1, "10.0.0.2", "UP", False)),
)  # fmt: skip
PORT = Port(0, "10.0.0.1", "UP", False)
SHUT = (Node("/dev/davinci0", "HwHiAiUser", False),)
BUSY = (Chip("910B1", "OK", 60000, 65536),)
CHIP_310P = Chip("310P3", "OK", 1, 21527)
NO_DEVICE: dict[str, Any] = {"nodes": (), "chips": ()}
HCCL = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
ATB = "ImportError: libatb.so: cannot open shared object file: No such file or directory"
TLS = "OSError: libgomp-d22c30c5.so.1: cannot allocate memory in static TLS block"
GOMP = "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory"
SYMBOL = "ImportError: libtorch_npu.so: undefined symbol: aclrtGetSocName"


def shell(**more: str) -> dict[str, Any]:
    return {"environment": {**FIT.environment, **more}}


def packages(**more: str) -> dict[str, Any]:
    return {"packages": {**FIT.packages, **more}}


def without(name: str) -> dict[str, Any]:
    return {"packages": {key: value for key, value in FIT.packages.items() if key != name}}


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("no_linux", {"system": "Darwin"}, "device.kind: cpu"),
    (
        "no_driver",
        NO_DEVICE | {"driver_version": None, "has_npu_smi": False, "in_container": False},
        "install Ascend HDK",
    ),
    ("no_device_in_container", NO_DEVICE, "--device /dev/davinci_manager"),
    ("no_device", NO_DEVICE | {"in_container": False}, "install the driver again"),
    ("no_control_node", {"absent_control_nodes": ("/dev/hisi_hdc",)}, "--device /dev/hisi_hdc"),
    ("not_in_group", {"nodes": SHUT, "groups": ("users",)}, "usermod -aG HwHiAiUser"),
    ("no_permission", {"nodes": SHUT}, "chmod 660 /dev/davinci0"),
    ("no_permission", {"nodes": SHUT, "is_root": True, "groups": ("root",)}, "chmod 660"),
    ("closed_folder", {"closed": ("/opt/driver",)}, "usermod -aG $(stat -c %G /opt/driver) $USER"),
    ("npu_smi_cannot_run", {"npu_smi_refusal": "Exec format error", "chips": ()}, "-v /usr/local/bin"),
    ("npu_smi_fails", {"npu_smi_error": "dcmi module initialize failed. ret is -8005"}, "fuser -v"),
    ("unhealthy", {"chips": (*FIT.chips, Chip("910B1", "Alarm", 1, 65536, 1, 0))}, "health -i 1 -c 0"),
    ("little_memory", {"chips": BUSY}, "lower cache.memory_fraction"),
    ("little_memory", {"chips": FIT.chips[::-1]}, "export ASCEND_RT_VISIBLE_DEVICES=1, end it"),
    ("old_driver_for_graphs", {"driver_version": "25.5.0"}, "25.5.1 or newer"),
    ("python", {"python": (3, 13)}, "PYTHON=python3.11"),
    ("old_glibc", {"glibc": (2, 17)}, "newer system"),
    ("no_cann", {"cann_home": None, "cann_version": None, "environment": BOUND}, "install the CANN toolkit"),
    ("not_sourced", {"environment": BOUND}, "source /usr/local/Ascend/ascend-toolkit/set_env.sh"),
    ("several_cann", {"other_cann": ("/root/Ascend/cann",)}, "source the set_env.sh of the right one"),
    ("wrong_home", shell(ASCEND_HOME_PATH="/opt/gone"), "open a new shell"),
    ("no_kernels", {"has_kernels": False}, "Ascend-cann-kernels"),
    ("no_hccl", {"has_hccl": False}, "toolkit again"),
    ("old_driver", {"driver_version": "24.1.0"}, "HDK 25.5 or newer"),
    ("no_torch", without("torch"), "scripts/setup.sh"),
    ("no_torch_npu", without("torch_npu"), "pip install torch-npu==2.9.0"),
    ("versions_apart", packages(torch="2.8.0+cpu"), "pip install torch-npu==2.8.0"),
    ("cann_apart", {"cann_version": "8.3.RC1"}, "install CANN 9.0"),
    ("cann_apart", packages(torch="2.13.0", torch_npu="2.13.0"), "install CANN 9.1 or newer"),
    (
        "too_old",
        packages(torch="2.9.0", torch_npu="2.9.0.post2") | {"chips": (CHIP_310P,)},
        "install CANN 9.1, then",
    ),
    ("too_old", packages(torch_npu="2.9.0.post7") | {"npu_lacks": ("npu_f",)}, "torch_npu 2.9.0.post2"),
    ("unknown_pair", {"cann_version": None}, "verify_npu.sh"),
    ("unknown_pair", packages(torch="2.13.0", torch_npu="2.13.0") | {"cann_version": "9.1.0"}, "verify_npu"),
    ("sees_fewer", {"num_devices": 1}, "npu-smi info"),
    ("cuda_torch", {"torch_cuda": "12.8"}, "torch==2.9.0+cpu"),
    ("cann_packages", without("decorator"), "setup.sh npu installs them"),
    ("static_tls", {"npu_error": TLS}, "LD_PRELOAD"),
    (
        "torch_fails",
        shell(TORCH_DEVICE_BACKEND_AUTOLOAD="0") | {"torch_error": GOMP},
        "pip install torch==2.9.0+cpu",
    ),
    ("autoload", {"torch_error": "RuntimeError: Failed to load the backend extension"}, "AUTOLOAD=0"),
    ("no_atb", {"npu_error": ATB}, "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    ("no_library", {"npu_error": HCCL}, "set_env.sh"),
    ("import_fails", {"npu_error": SYMBOL}, "table of versions"),
    ("sees_none", {"num_devices": 0}, "unset ASCEND_RT_VISIBLE_DEVICES"),
    ("visible_devices", shell(ASCEND_RT_VISIBLE_DEVICES="0,2"), "export ASCEND_RT_VISIBLE_DEVICES=0"),
    ("visible_devices", shell(ASCEND_RT_VISIBLE_DEVICES="npu:0"), "export ASCEND_RT_VISIBLE_DEVICES=0"),
    (
        "allocator",
        shell(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64"),
        "=expandable_segments:True",
    ),
    ("hccl_timeout", shell(HCCL_CONNECT_TIMEOUT="60"), "unset it"),
    ("hccl_exec_timeout", shell(HCCL_EXEC_TIMEOUT="5"), "unset it"),
    ("hccl_buffer", shell(HCCL_BUFFSIZE="0"), "unset HCCL_BUFFSIZE"),
    ("hccl_interface", shell(HCCL_SOCKET_IFNAME="eth99"), "between the machines"),
    ("hccl_interface", shell(HCCL_SOCKET_IFNAME="^lo,eth"), "between the machines"),
    ("hccl_address", shell(HCCL_IF_IP="1.2.3.4"), "own address"),
    (
        "rank_table",
        shell(RANK_TABLE_FILE="/nope.json") | {"rank_table_error": "No such file or directory"},
        "unset RANK_TABLE_FILE",
    ),
    ("runtime_devices", shell(ASCEND_VISIBLE_DEVICES="1"), "export ASCEND_RT_VISIBLE_DEVICES=1"),
    (
        "runtime_devices",
        shell(ASCEND_VISIBLE_DEVICES="2-3,0") | {"nodes": 2 * FIT.nodes, "num_devices": 4},
        "export ASCEND_RT_VISIBLE_DEVICES=0,2,3,",
    ),
    ("device_address", {"ports": (PORT, replace(PORT, device=1, address=None))}, "/etc/hccn.conf"),
    ("device_link", {"ports": (PORT, replace(PORT, device=1, link="DOWN"))}, "link_stat"),
    ("device_tls", {"ports": (PORT, replace(PORT, device=1, tls=True))}, "-tls -s enable 0"),
    ("expansion_mode", shell(HCCL_OP_EXPANSION_MODE="aiv"), "HCCL_OP_EXPANSION_MODE=AIV"),
    ("unbound_threads", shell(CPU_AFFINITY_CONF="mode:0"), "CPU_AFFINITY_CONF=1,npu_affine:1,bind_irq:0"),
    ("blocking", shell(ASCEND_LAUNCH_BLOCKING="1"), "unset"),
    ("task_queue", shell(TASK_QUEUE_ENABLE="0"), "TASK_QUEUE_ENABLE=1"),
    ("loud_log", shell(ASCEND_GLOBAL_LOG_LEVEL="1"), "ASCEND_GLOBAL_LOG_LEVEL=3"),
    ("autoload_off", shell(TORCH_DEVICE_BACKEND_AUTOLOAD="0"), "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ("little_shm", {"shm_bytes": 2**26}, "--shm-size"),
    ("few_files", {"max_open_files": 1024}, "ulimit -n"),
    ("locale", {"encoding": "ANSI_X3.4-1968"}, "C.UTF-8"),
    ("proxy", shell(no_proxy="example.org"), "no_proxy=localhost"),
    ("clock", {"year": 1970}, "timedatectl"),
]  # fmt: skip


def test_a_sound_environment_has_no_finding() -> None:
    assert diagnose(FIT) == {}
    plenty = shell(ASCEND_RT_VISIBLE_DEVICES="0,1", HCCL_CONNECT_TIMEOUT="1200", TASK_QUEUE_ENABLE="2")
    assert diagnose(replace(FIT, **plenty)) == {}
    network = shell(HCCL_SOCKET_IFNAME="^docker,lo", HCCL_IF_IP="10.0.0.9", HCCL_EXEC_TIMEOUT="0")
    assert diagnose(replace(FIT, **network)) == {}
    assert diagnose(replace(FIT, ports=(), **shell(HCCL_SOCKET_IFNAME="=eth1", HCCL_BUFFSIZE="400"))) == {}
    image = packages(torch="2.10.0+cpu", torch_npu="2.10.0.post4")
    assert diagnose(replace(FIT, cann_version="9.1.0", **image)) == {}
    own_word = packages(torch_npu="2.9.0.post2+git4c901a4") | {"npu_lacks": ()}
    assert diagnose(replace(FIT, **own_word)) == {}
    runtime = shell(ASCEND_VISIBLE_DEVICES="0-1", ASCEND_RT_VISIBLE_DEVICES="0")
    assert diagnose(replace(FIT, num_devices=1, **runtime)) == {}
    for said in ("0-1", "void", "npu-Ascend910-0"):
        assert diagnose(replace(FIT, **shell(ASCEND_VISIBLE_DEVICES=said))) == {}
    for mode in ("AIV_ONLY", "CCU_MS", "CCU_SCHED"):  # of the 950
        assert diagnose(replace(FIT, **shell(HCCL_OP_EXPANSION_MODE=mode))) == {}


def test_one_folder_by_several_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "8.5.0").mkdir()
    (tmp_path / "latest").symlink_to("8.5.0")
    home = f"{tmp_path}/latest"
    for other in (f"{tmp_path}/8.5.0", f"{home}/", ""):
        environment = {"ASCEND_TOOLKIT_HOME": home, "ASCEND_HOME_PATH": other} | BOUND
        assert diagnose(replace(FIT, cann_home=home, environment=environment)) == {}
    environment = {"ASCEND_TOOLKIT_HOME": "", "ASCEND_HOME_PATH": ""} | BOUND
    assert set(diagnose(replace(FIT, environment=environment))) == {"not_sourced"}


def test_a_device_that_is_hidden_is_not_asked_for() -> None:
    sick = replace(FIT, chips=(Chip("910B1", "Warning", 3200, 65536), FIT.chips[0]))
    closed = replace(FIT, nodes=(*SHUT, FIT.nodes[1]), groups=("users",))
    for facts, name in ((sick, "unhealthy"), (closed, "not_in_group")):
        assert diagnose(facts)[name].is_fatal
        for hidden in ("1", " 1 "):
            assert name not in diagnose(replace(facts, **shell(ASCEND_RT_VISIBLE_DEVICES=hidden)))
        assert name in diagnose(replace(facts, **shell(ASCEND_RT_VISIBLE_DEVICES="npu:1")))
    busy = replace(FIT, **shell(ASCEND_RT_VISIBLE_DEVICES="1"), chips=(FIT.chips[0], *BUSY))
    assert set(diagnose(busy)) == {"little_memory"}


@pytest.mark.parametrize(("name", "groups"), [("not_in_group", ("users",)), ("no_permission", FIT.groups)])
def test_a_closed_device_that_is_not_the_first_is_advice(name: str, groups: tuple[str, ...]) -> None:
    found = diagnose(replace(FIT, nodes=(FIT.nodes[0], *SHUT), groups=groups))
    assert [(each, finding.is_fatal) for each, finding in found.items()] == [(name, False)]


def test_a_broken_torch_is_told_without_torch_npu_too() -> None:
    found = diagnose(replace(FIT, torch_error=GOMP, **without("torch_npu")))
    assert set(found) == {"torch_fails", "no_torch_npu"}


@each_of("name, changes, fix", CASES)
def test_a_fault_is_told_by_its_check_alone(name: str, changes: dict[str, Any], fix: str) -> None:
    found = diagnose(replace(FIT, **changes))
    also = {"old_driver": {"old_driver_for_graphs"}, "torch_fails": {"autoload_off"}}
    assert set(found) == {name} | also.get(name, set())
    finding = found[name]
    assert fix in finding.fix
    for text in (finding.problem, finding.cause, finding.fix, finding.source):
        assert text.strip() == text != ""
        assert "\n" not in text


def test_every_check_has_its_case() -> None:
    assert {name_of(check) for check in CHECKS} == {name for name, *_ in CASES}
    assert len(CHECKS) >= 20


def test_what_keeps_all_from_running_comes_first() -> None:
    facts = replace(FIT, shm_bytes=0, cann_version="8.3", max_open_files=3)
    findings = diagnose(facts)
    assert [finding.is_fatal for finding in findings.values()] == [True, False, False]
    words = in_words(facts, findings)
    assert "not fit: 1 problems; 2 pieces of advice" in words
    assert words.index("PROBLEM") < words.index("advice ")


PRINTED = {
    "with one line a chip": """
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
| 1     910B4-1             | Alarm         | 91.3        33                0    / 0             |
| 0                         | 0000:02:00.0  | 0           0    / 0          61197/ 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 4711          | python                   | 58000                   |
""",
    "with two chips a card": """
| npu-smi 26.0.rc2                            Version: 26.0.rc2   |
| NPU   Name                | Health        | Power(W)             Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)   |
+===========================+===============+=======================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0   |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536   |
+---------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0   |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536   |
| No running processes found in NPU 0   |
""",
}


def test_npu_smi_is_read_as_it_prints() -> None:
    single, double = PRINTED.values()
    well = Chip("910B4-1", "OK", 3197, 65536)
    assert chips_of(single) == (well, Chip("910B4-1", "Alarm", 61197, 65536, npu=1))
    first = Chip("Ascend910", "OK", 3419, 65536)
    assert chips_of(double) == (first, Chip("Ascend910", "OK", 2874, 65536, chip=1))
    assert chips_of("dcmi module initialize failed. ret is -8005") == ()


def test_versions_are_read_as_they_are_written() -> None:
    found = [numbers(each) for each in ("8.3.RC1", "25.5.1", "V100R001", None, "")]
    assert found == [(8, 3), (25, 5), None, None, None]


@pytest.mark.parametrize(
    ("file", "refusal", "error"),
    [
        (b"\x7fELF of another machine", "Exec format error", None),
        (b"#!/no/such/interpreter\n", "No such file or directory", None),
        ("#!/bin/sh\necho 驱动未加载 >&2\nexit 1\n".encode("gbk"), None, "\ufffd"),
        (b"#!/bin/sh\nexit 3\n", None, "ended by 3"),
    ],
)
def test_an_npu_smi_that_does_not_work_is_told(
    file: bytes, refusal: str | None, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "npu-smi").write_bytes(file)
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("doctor.facts._error_of", lambda code: (None, "1"))
    facts = gather()
    assert facts.npu_smi_refusal == refusal
    assert (facts.npu_smi_error is None) == (error is None)
    assert (error or "") in (facts.npu_smi_error or "")
    assert {"npu_smi_cannot_run", "npu_smi_fails"} & set(diagnose(facts))


def test_what_a_library_says_in_another_encoding_is_told() -> None:
    code = "import os, sys; os.write(2, b'RuntimeError: \\xc7\\xfd\\xb6\\xaf 507899'); sys.exit(1)"
    assert "507899" in str(_error_of(code)[0])


@pytest.fixture(scope="module")
def here() -> MachineFacts:
    return gather()


def test_this_machine_is_told_as_it_is(here: MachineFacts) -> None:
    devices = list(Path("/dev").glob("davinci[0-9]*"))
    assert len(here.nodes) == len(devices)
    assert here.python == sys.version_info[:2]
    assert here.packages["torch"].startswith("2.")
    assert here.torch_error is None
    if not devices:
        assert {"no_driver", "no_device", "no_device_in_container"} & set(diagnose(here))


def test_a_report_says_nothing_of_the_rest_of_the_shell(here: MachineFacts) -> None:
    facts = replace(here, environment={"SECRET_TOKEN": "abc", "ASCEND_HOME_PATH": "/x", "HCCL_BUFFSIZE": "2"})
    told = json.loads(json.dumps(in_json(facts, diagnose(facts))))
    assert told["facts"]["environment"] == {"ASCEND_HOME_PATH": "/x", "HCCL_BUFFSIZE": "2"}
    assert told["is_fit"] == (not any(each["is_fatal"] for each in told["findings"].values()))


def test_the_command_ends_by_its_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.doctor.gather", lambda: FIT)
    assert main([]) == 0
    assert "fit to compute on an NPU; 0 pieces of advice" in capsys.readouterr().out
    monkeypatch.setattr("scripts.doctor.gather", lambda: replace(FIT, nodes=SHUT))
    assert main(["--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["findings"]) == ["no_permission"]


HCCN = """#!/bin/sh
case "$2 $3" in
"4 -ip") echo "ipaddr:192.168.1.10"; echo "netmask:255.255.255.0" ;;
"4 -link") echo "link status: UP" ;;
"4 -tls") echo "dev_id:4, tls switch[0](0:disable, 1:enable), tls alarm time threshold[60]days" ;;
"5 -link") echo "link status: DOWN" ;;
"5 -tls") echo "dev_id:5, tls switch[1](0:disable, 1:enable)" ;;
*) echo "no such thing"; exit 1 ;;
esac
"""


def test_the_ports_of_the_devices_that_are_here_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "hccn_tool"
    tool.write_text(HCCN)
    tool.chmod(0o755)
    monkeypatch.setattr("doctor.facts._hccn_tool", lambda: str(tool))
    here = [Path(f"/dev/davinci{number}") for number in (4, 5, 12)]  # of a container, by the host's numbers
    assert _ports(here) == (
        Port(4, "192.168.1.10", "UP", False),
        Port(5, None, "DOWN", True),
        Port(12, None, None, None),
    )
    tool.unlink()
    assert _ports(here[:1]) == (Port(4, None, None, None),)


def test_a_rank_table_is_read(tmp_path: Path) -> None:
    assert _rank_table_error(None) is None
    assert _rank_table_error(str(tmp_path / "none.json")) == "No such file or directory"
    table = tmp_path / "table.json"
    cases = {"{": "it is not JSON", "[]": "it has no server_list", '{"server_list": []}': None}
    for text, error in cases.items():
        table.write_text(text)
        found = _rank_table_error(str(table))
        assert found == error if error is None else str(found).startswith(error)


def test_the_interfaces_of_this_machine_have_its_addresses(here: MachineFacts) -> None:
    assert here.interfaces.keys() == {name for _, name in socket.if_nameindex()}
    assert here.interfaces.get("lo", ("127.0.0.1",)) == ("127.0.0.1",)


@pytest.mark.parametrize("place", ["ascend-toolkit/latest", "cann", "latest", ""])
@pytest.mark.parametrize("by", ["ASCEND", "HOME", "ASCEND_HOME_PATH"])
def test_cann_is_found_by_the_scripts_where_the_doctor_finds_it(place: str, by: str, tmp_path: Path) -> None:
    (tmp_path / "Ascend" / place).mkdir(parents=True)
    (tmp_path / "Ascend" / place.removesuffix("latest") / "set_env.sh").touch()
    ascend = f"{tmp_path}/Ascend"
    named = {"ASCEND": ascend, "HOME": str(tmp_path), "ASCEND_HOME_PATH": f"{ascend}/{place}"}
    shell = {"PATH": os.environ["PATH"], "ASCEND": "/nonexistent", "HOME": "/nonexistent", by: named[by]}
    command = ["bash", "-c", "source scripts/cann.sh; cann_home"]
    done = subprocess.run(command, cwd=ROOT, env=shell, capture_output=True, text=True, check=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", shell["HOME"])
        assert (done.stdout.strip() or None) == _cann_home(shell)
    is_found = by == "ASCEND_HOME_PATH" or (bool(place) and not (by == "HOME" and place == "latest"))
    assert (done.returncode == 0) == is_found


def test_nnal_is_found_in_the_folder_of_a_user_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shared, own = tmp_path / "shared", tmp_path / "Ascend/nnal"
    assert _nnal_home({"ASCEND": str(shared)}) is None
    own.mkdir(parents=True)
    assert _nnal_home({"ASCEND": str(shared)}) == str(own)
    (shared / "nnal").mkdir(parents=True)
    assert _nnal_home({"ASCEND": str(shared)}) == f"{shared}/nnal"


def test_of_several_cann_the_new_place_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    environment = {"ASCEND": str(tmp_path), "HOME": "/nonexistent"}
    old, new = tmp_path / "ascend-toolkit/latest", tmp_path / "cann"
    for each in (old, new):
        each.mkdir(parents=True)
    command = ["bash", "-c", "source scripts/cann.sh; cann_home"]
    shell = environment | {"PATH": os.environ["PATH"]}

    def found() -> str | None:
        done = subprocess.run(command, cwd=ROOT, env=shell, capture_output=True, text=True, check=False)
        assert _cann_home(environment) == (done.stdout.strip() or None)
        return _cann_home(environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", "/nonexistent")
        assert found() is None, "no folder has a set_env.sh"
        (old / "set_env.sh").touch()
        assert (found(), _other_cann(environment, found())) == (str(old), ())
        (new / "set_env.sh").touch()
        assert (found(), _other_cann(environment, found())) == (str(new), (str(old),))
        assert _other_cann(environment, str(old)) == (str(new),)
        (tmp_path / "latest").symlink_to(new)
        assert _other_cann(environment, str(new)) == (str(old),), "two names of one folder"


def test_a_folder_that_is_closed_to_this_user_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, inside = os.stat, str(tmp_path / "cann")  # closed by hand, since root may enter any folder

    def closed(path: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(inside):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    assert _field(Path(inside, "version.info"), "Version") is None
    assert _cann_home({"ASCEND": str(tmp_path), "ASCEND_HOME_PATH": inside}) != inside
    assert _closed((inside,)) == (str(tmp_path),)


def test_a_torch_npu_whose_version_is_unknown_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doctor.facts._error_of", lambda code, *product: (None, json.dumps([*product])))
    chips = (CHIP_310P,)
    assert _npu_lacks("2.9.0.post1+git4c901a4", chips) == ("310P",)
    assert _npu_lacks("2.9.0.post7", ()) == ("910B",)
    assert _npu_lacks("2.10.0.post4", chips) is None
    monkeypatch.setattr("doctor.facts._error_of", lambda code, *product: ("ImportError: no", ""))
    assert _npu_lacks("2.9.0.post7", ()) is None
