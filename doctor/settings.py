"""Check the settings of shell and system that break or slow a run."""

from __future__ import annotations

import re

from borders.numbers import integers
from devices.ascend_limits import BUFFER_NAME, buffer_mib
from devices.present import VISIBLE_NPUS as VISIBLE
from doctor.facts import Check, Finding, MachineFacts

ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
LEAST_SHM = 2**30
LEAST_FILES = 4096
LEAST_TIMEOUT_S = 120  # HCCL's default
LEAST_EXEC_TIMEOUT_S = 68
RUNTIME_VISIBLE = "ASCEND_VISIBLE_DEVICES"
CLUSTER = "vllm-ascend, multi-node documents, Verify Multi-Node Communication Environment"
YEAR = 2025  # no supported CANN is older
EXPANSION_MODES = ("AIV", "AIV_ONLY", "AI_CPU", "CCU_MS", "CCU_SCHED", "HOST", "HOST_TS")
AFFINITY = "CPU_AFFINITY_CONF"
VARIABLES = "Ascend Extension for PyTorch, environment variables"


def _visible_devices(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get(VISIBLE)
    if said is None:
        return None
    numbers = [each.strip() for each in said.split(",")]
    if not all(each.isdecimal() for each in numbers):
        problem = f"{VISIBLE} is {said!r}, which is no list of numbers"
    elif facts.chips and any(int(each) >= len(facts.chips) for each in numbers):
        problem = f"{VISIBLE} is {said}, and the chips here are 0 to {len(facts.chips) - 1}"
    elif numbers != sorted(set(numbers), key=int):
        problem = f"{VISIBLE} is {said}, which is not in rising order or names a chip twice"
    else:
        return None
    return Finding(
        problem,
        "the runtime ends the list at the first number that it does not know, and sees fewer devices or none",
        f"export {VISIBLE}=0, or another number of `npu-smi info`; unset it to see all",
        "CANN environment variables",
    )


def _allocator(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get(ALLOCATOR, "")
    options = dict(part.split(":", 1) for part in said.replace(" ", "").split(",") if ":" in part)
    clash = {"max_split_size_mb", "garbage_collection_threshold"} & set(options)
    if options.get("expandable_segments", "").lower() != "true" or not clash:
        return None
    return Finding(
        f"{ALLOCATOR} sets expandable_segments and {' and '.join(sorted(clash))}",
        "segments that grow are not split: torch_npu refuses the two together at the first allocation",
        f"export {ALLOCATOR}=expandable_segments:True",
        f"{VARIABLES}; vllm-ascend PR #5855, #6572",
    )


def _hccl_timeout(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get("HCCL_CONNECT_TIMEOUT")
    if said is None or integers(LEAST_TIMEOUT_S, 7200).parse(said):
        return None
    return Finding(
        f"HCCL_CONNECT_TIMEOUT is {said!r}",
        "it is in seconds, from 120 to 7200; ranks that load for longer than it end in EI0006",
        "unset it, and the engine sets it by parallel.start_timeout_s",
        "vllm-ascend #2248, #1221, #486",
        is_fatal=False,
    )


def _hccl_exec_timeout(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get("HCCL_EXEC_TIMEOUT")
    number = None if said is None else integers(0, 2**31 - 1).parse(said)
    if said is None or number == 0 or (number or 0) >= LEAST_EXEC_TIMEOUT_S:
        return None
    return Finding(
        f"HCCL_EXEC_TIMEOUT is {said!r}",
        "it is in seconds, and steps of 68 s on some products: a rank that waits longer for another, as while"
        " one of them compiles operators, is ended; 0 waits for ever",
        "unset it",
        "HCCL, environment variables",
        is_fatal=False,
    )


def _hccl_buffer(facts: MachineFacts) -> Finding | None:
    try:
        buffer_mib(facts.environment)
    except ValueError as error:
        return Finding(
            str(error).partition(";")[0],
            "it is the size of HCCL's buffers in MiB, and the engine does not start with it",
            f"unset {BUFFER_NAME}",
            "HCCL, environment variables",
        )
    return None


def _hccl_interface(facts: MachineFacts) -> Finding | None:
    said, names = facts.environment.get("HCCL_SOCKET_IFNAME"), tuple(facts.interfaces)
    if not said or not names or any(_is_chosen(name, said) for name in names):
        return None
    return Finding(
        f"HCCL_SOCKET_IFNAME is {said}, and the network interfaces here are {', '.join(names)}",
        "HCCL then finds no address by which ranks reach each other, and ends in EI0006 or EI0019",
        "export HCCL_SOCKET_IFNAME to the one between the machines, or unset it",
        f"HCCL, environment variables; {CLUSTER}",
        is_fatal=len(facts.nodes) > 1,
    )


def _hccl_address(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get("HCCL_IF_IP")
    addresses = [each for found in facts.interfaces.values() for each in found]
    if not said or not addresses or said in addresses or ":" in said:  # addresses of IPv6 are not looked for
        return None
    return Finding(
        f"HCCL_IF_IP is {said}, and the addresses here are {', '.join(addresses)}",
        "it is the address of this very machine; that of another was copied, or the address has changed",
        "export HCCL_IF_IP to this machine's own address, or unset it",
        f"HCCL, environment variables; {CLUSTER}",
        is_fatal=len(facts.nodes) > 1,
    )


def _rank_table(facts: MachineFacts) -> Finding | None:
    if facts.rank_table_error is None:
        return None
    return Finding(
        f"RANK_TABLE_FILE is {facts.environment.get('RANK_TABLE_FILE')}: {facts.rank_table_error}",
        "an engine of several ranks finds its machines in this file where the variable is set",
        "unset RANK_TABLE_FILE",
        "docs/cluster.md, Several machines",
        is_fatal=len(facts.nodes) > 1,
    )


def _runtime_devices(facts: MachineFacts) -> Finding | None:
    """Find the variable of the container runtime where it hides nothing; it may also name chips."""
    said = facts.environment.get(RUNTIME_VISIBLE, "")
    ranges = [re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", each) for each in said.split(",")]
    if VISIBLE in facts.environment or not all(ranges):
        return None
    ends = [(int(each[1]), int(each[2] or each[1])) for each in ranges if each]
    chosen = {index for first, last in ends for index in range(first, last + 1)}
    if not 0 < len(chosen) < len(facts.nodes):
        return None
    return Finding(
        f"{RUNTIME_VISIBLE} is {said}, and {len(facts.nodes)} devices are visible",
        f"only the container runtime reads it, when it starts a container; torch_npu reads {VISIBLE}",
        f"export {VISIBLE}={','.join(map(str, sorted(chosen)))}, or unset {RUNTIME_VISIBLE}",
        "Ascend Docker Runtime; CANN environment variables",
        is_fatal=False,
    )


def _device_address(facts: MachineFacts) -> Finding | None:
    absent = [str(port.device) for port in facts.ports if port.address is None]
    if not absent or len(facts.ports) == 1:
        return None
    return Finding(
        f"hccn_tool shows no address of device {', '.join(absent)}",
        "collectives between machines go from device to device; in a container /etc/hccn.conf is not mounted",
        "hccn_tool -i N -ip -s address A netmask M on the host, and -v /etc/hccn.conf:/etc/hccn.conf:ro",
        CLUSTER,
        is_fatal=False,
    )


def _device_link(facts: MachineFacts) -> Finding | None:
    down = [str(port.device) for port in facts.ports if port.link not in (None, "UP")]
    if not down:
        return None
    return Finding(
        f"hccn_tool shows the link of device {', '.join(down)} as down",
        "a cable or a switch's port is not there; on one machine ranks do without it, on several they do not",
        "see `hccn_tool -i N -link_stat -g`, the cable, and the switch",
        CLUSTER,
        is_fatal=False,
    )


def _device_tls(facts: MachineFacts) -> Finding | None:
    switched = {port.tls for port in facts.ports if port.tls is not None}
    if len(switched) < 2:
        return None
    on = ", ".join(str(port.device) for port in facts.ports if port.tls)
    return Finding(
        f"TLS of the devices' network is on for {on}, and off for the others",
        "devices whose switches differ do not connect; it must be the same on every machine too",
        "hccn_tool -i N -tls -s enable 0 for each device of every machine, or 1 for all",
        CLUSTER,
        is_fatal=len(facts.nodes) > 1,
    )


def _is_chosen(name: str, said: str) -> bool:
    """Return whether HCCL_SOCKET_IFNAME chooses it: it lists beginnings, = whole names, ^ all others."""
    is_other = said.startswith("^")
    names = said.removeprefix("^")
    whole = names.startswith("=")
    among = [each.strip() for each in names.removeprefix("=").split(",")]
    return any(name == each if whole else name.startswith(each) for each in among) != is_other


def _expansion_mode(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get("HCCL_OP_EXPANSION_MODE")
    if said is None or said in EXPANSION_MODES:
        return None
    return Finding(
        f"HCCL_OP_EXPANSION_MODE is {said!r}",
        f"HCCL knows {', '.join(EXPANSION_MODES)}, and takes the product's default for anything else",
        "export HCCL_OP_EXPANSION_MODE=AIV, or unset it",
        "HCCL, environment variables",
        is_fatal=False,
    )


def _unbound_threads(facts: MachineFacts) -> Finding | None:
    """Advise on machines with several sockets, which those with aarch64 have."""
    said = facts.environment.get(AFFINITY, "0")
    if facts.architecture != "aarch64" or not facts.chips or said.removeprefix("mode:")[:1] != "0":
        return None
    return Finding(
        f"{AFFINITY} is {'0' if AFFINITY in facts.environment else 'not set'}",
        "threads that launch operators may run on a socket that is far from their NPU, and are moved about",
        f"export {AFFINITY}=1,npu_affine:1,bind_irq:0; scripts/launch.sh sets it",
        VARIABLES,
        is_fatal=False,
    )


def _blocking(facts: MachineFacts) -> Finding | None:
    if facts.environment.get("ASCEND_LAUNCH_BLOCKING") != "1":
        return None
    return Finding(
        "ASCEND_LAUNCH_BLOCKING is 1",
        "each operator waits for the one before, to find faults: it is slow, and no graph is captured",
        "unset ASCEND_LAUNCH_BLOCKING",
        VARIABLES,
        is_fatal=False,
    )


def _task_queue(facts: MachineFacts) -> Finding | None:
    if facts.environment.get("TASK_QUEUE_ENABLE") != "0":
        return None
    return Finding(
        "TASK_QUEUE_ENABLE is 0",
        "operators are then prepared and launched by one thread in turn",
        "export TASK_QUEUE_ENABLE=1",
        VARIABLES,
        is_fatal=False,
    )


def _loud_log(facts: MachineFacts) -> Finding | None:
    said = facts.environment.get("ASCEND_GLOBAL_LOG_LEVEL")
    if said not in ("0", "1"):
        return None
    return Finding(
        f"ASCEND_GLOBAL_LOG_LEVEL is {said}",
        "CANN writes a line for every call: steps get slower and ~/ascend/log grows",
        "export ASCEND_GLOBAL_LOG_LEVEL=3",
        "CANN environment variables",
        is_fatal=False,
    )


def _autoload_off(facts: MachineFacts) -> Finding | None:
    if facts.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0" or "torch_npu" not in facts.packages:
        return None
    return Finding(
        "TORCH_DEVICE_BACKEND_AUTOLOAD is 0",
        "torch then does not load torch_npu by itself, and programs that only import torch find no NPU",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD; this project imports torch_npu by name and runs either way",
        "torch_npu 2.13.0",
        is_fatal=False,
    )


def _little_shm(facts: MachineFacts) -> Finding | None:
    if facts.shm_bytes is None or facts.shm_bytes >= LEAST_SHM:
        return None
    return Finding(
        f"/dev/shm has {facts.shm_bytes // 2**20} MiB",
        "ranks and processes share memory there; a container gets 64 MiB unless it asks for more",
        "start the container with --shm-size 16g, or 1g at least",
        "vllm-ascend, docs/source/installation.md",
        is_fatal=False,
    )


def _few_files(facts: MachineFacts) -> Finding | None:
    if facts.max_open_files >= LEAST_FILES:
        return None
    return Finding(
        f"a process may open {facts.max_open_files} files",
        "libraries, shards of weights and a connection for each client are files",
        "ulimit -n 65536, or LimitNOFILE= of the service",
        "getrlimit(2)",
        is_fatal=False,
    )


def _locale(facts: MachineFacts) -> Finding | None:
    if facts.encoding.replace("-", "").lower() == "utf8":
        return None
    return Finding(
        f"text is read and written as {facts.encoding}",
        "an answer in Chinese then ends in UnicodeEncodeError",
        "export LANG=C.UTF-8 PYTHONUTF8=1",
        "PEP 538, PEP 540",
    )


def _proxy(facts: MachineFacts) -> Finding | None:
    names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    proxies = [name for name in names if facts.environment.get(name)]
    spared = facts.environment.get("no_proxy", facts.environment.get("NO_PROXY", ""))
    if not proxies or {"localhost", "127.0.0.1", "*"} & set(spared.replace(" ", "").split(",")):
        return None
    return Finding(
        f"{proxies[0]} is set and no_proxy does not name localhost",
        "a client on this machine then asks the proxy for the server beside it, and gets 502 or 503",
        "export no_proxy=localhost,127.0.0.1",
        "curl(1)",
        is_fatal=False,
    )


def _clock(facts: MachineFacts) -> Finding | None:
    if facts.year >= YEAR:
        return None
    return Finding(
        f"the clock says it is {facts.year}",
        "certificates are then not valid yet, and files seem to be of the future, so that much is made anew",
        "set the clock: timedatectl set-ntp true",
        "timedatectl(1)",
    )


CHECKS: tuple[Check, ...] = (
    _visible_devices,
    _allocator,
    _hccl_timeout,
    _hccl_exec_timeout,
    _hccl_buffer,
    _hccl_interface,
    _hccl_address,
    _rank_table,
    _runtime_devices,
    _device_address,
    _device_link,
    _device_tls,
    _expansion_mode,
    _unbound_threads,
    _blocking,
    _task_queue,
    _loud_log,
    _autoload_off,
    _little_shm,
    _few_files,
    _locale,
    _proxy,
    _clock,
)
