"""Check that a machine has an NPU on which this user may compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from devices.present import VISIBLE_NPUS as VISIBLE
from devices.present import Chip
from doctor.facts import CONTROL_NODES, Check, Finding, MachineFacts, Node, numbers

Device = TypeVar("Device", Node, Chip)

GROUP = "HwHiAiUser"
CAPTURING_DRIVER = (25, 5)  # 25.5.1: the first two numbers are compared, then the third
FREE_SHARE = 0.8
# What a container is started with, beside its devices; serving/deploy/compose.ascend.yaml has the same
CONTAINER = ("--network host", "--shm-size 16g")
MOUNTS = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
DOCKER = " ".join(
    [
        "start the container with --device /dev/davinci0, so for every device,",
        *(f"--device {each}" for each in CONTROL_NODES),
        *CONTAINER,
        *(f"-v {each}:{each}:ro" for each in MOUNTS),
    ]
)
INSTALLING = "vllm-ascend, docs/source/installation.md"


def _no_linux(facts: MachineFacts) -> Finding | None:
    if facts.system == "Linux":
        return None
    return Finding(
        f"this is {facts.system}",
        "driver, CANN and torch_npu are made for Linux alone",
        "use a Linux machine, or device.kind: cpu",
        INSTALLING,
    )


def _no_driver(facts: MachineFacts) -> Finding | None:
    if facts.driver_version or facts.nodes or facts.has_npu_smi or facts.in_container:
        return None
    return Finding(
        "there is no Ascend driver: no driver/version.info, no /dev/davinci*, no npu-smi",
        "the driver is not installed, or this machine has no NPU",
        "if `lspci | grep -i d80` shows a card, install Ascend HDK (driver, then firmware) as root and"
        " restart; without a card use device.kind: cpu, or device.virtual: true to try",
        INSTALLING,
    )


def _no_device_in_container(facts: MachineFacts) -> Finding | None:
    if facts.nodes or not facts.in_container:
        return None
    return Finding(
        "this container has no /dev/davinci*",
        "it was started without devices, or its host has no NPU",
        DOCKER,
        INSTALLING,
    )


def _no_device(facts: MachineFacts) -> Finding | None:
    if facts.nodes or facts.in_container or not (facts.driver_version or facts.has_npu_smi):
        return None
    return Finding(
        "the driver is installed and there is no /dev/davinci*",
        "its kernel module is not loaded: the machine was not restarted, or the kernel was upgraded after it",
        "restart; if that does not help, install the driver again for this kernel, and see `dmesg`",
        "Ascend HDK installation guide",
    )


def _no_control_node(facts: MachineFacts) -> Finding | None:
    if not facts.nodes or not facts.absent_control_nodes:
        return None
    return Finding(
        f"there is no {', '.join(facts.absent_control_nodes)}",
        "a chip is opened through these device files, and the container was started without them",
        DOCKER,
        INSTALLING,
    )


def _not_in_group(facts: MachineFacts) -> Finding | None:
    nodes = _visible(facts, facts.nodes)
    closed = [index for index, node in nodes.items() if not node.is_usable and node.group not in facts.groups]
    if not closed or facts.is_root:
        return None
    node = nodes[closed[0]]
    return Finding(
        f"{node.path} belongs to the group {node.group}, and this user is not in it",
        f"only root and {node.group} may open the device (usually {GROUP})",
        f"sudo usermod -aG {node.group} $USER, then log in anew",
        "Ascend HDK installation guide",
        is_fatal=closed[0] == min(nodes),
    )


def _no_permission(facts: MachineFacts) -> Finding | None:
    nodes = _visible(facts, facts.nodes)
    closed = [
        index
        for index, node in nodes.items()
        if not node.is_usable and (facts.is_root or node.group in facts.groups)
    ]
    if not closed:
        return None
    node = nodes[closed[0]]
    return Finding(
        f"{node.path} cannot be read and written",
        "its mode was changed, or the container runtime forbids the device although the file is there",
        f"sudo chmod 660 {node.path}; in a container pass it by --device, not as a volume",
        INSTALLING,
        is_fatal=closed[0] == min(nodes),
    )


def _closed_folder(facts: MachineFacts) -> Finding | None:
    if not facts.closed:
        return None
    return Finding(
        f"{facts.closed[0]} is there, and this user may not enter it",
        "driver or toolkit was installed for one group, and what lies there is not found by anybody else",
        f"sudo usermod -aG $(stat -c %G {facts.closed[0]}) $USER, then log in anew",
        "Ascend HDK installation guide",
        is_fatal=not (facts.driver_version and facts.has_kernels),  # both are found elsewhere
    )


def _npu_smi_cannot_run(facts: MachineFacts) -> Finding | None:
    if facts.npu_smi_refusal is None:
        return None
    return Finding(
        f"npu-smi is there and cannot be run: {facts.npu_smi_refusal}",
        "the file is damaged or of another architecture, or the interpreter that it names is absent; the"
        " health and the memory of the chips stay unknown",
        "install the driver's own npu-smi again; in a container mount the one of the host,"
        " -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
        f"execve(2); {INSTALLING}",
        is_fatal=False,
    )


def _npu_smi_fails(facts: MachineFacts) -> Finding | None:
    if facts.npu_smi_error is None:
        return None
    return Finding(
        f"npu-smi info fails: {facts.npu_smi_error}",
        "the driver does not answer: a device is held by another container, is lost, or dcmi is absent",
        "end what holds the device on the host (`fuser -v /dev/davinci*`), mount /usr/local/dcmi, or restart",
        "vllm-ascend, docs/source/installation.md; HAMi ascend-device-plugin #9 (-8010)",
    )


def _unhealthy(facts: MachineFacts) -> Finding | None:
    sick = {index: chip for index, chip in _visible(facts, facts.chips).items() if chip.health != "OK"}
    if not sick:
        return None
    index, chip = next(iter(sick.items()))
    return Finding(
        f"npu-smi shows chip {index} as {chip.health}",
        "the chip reports a fault of hardware, link or temperature",
        f"see `npu-smi info -t health -i {chip.npu} -c {chip.chip}`; restart, or leave it out by {VISIBLE}",
        "npu-smi reference",
    )


def _little_memory(facts: MachineFacts) -> Finding | None:
    chips = _visible(facts, facts.chips)
    full = {
        index: f"chip {index}: {chip.used_mib} of {chip.total_mib} MiB"
        for index, chip in chips.items()
        if chip.total_mib and chip.used_mib > (1 - FREE_SHARE) * chip.total_mib
    }
    if not full or min(chips) not in full:
        return None
    free = ",".join(str(index) for index in chips if index not in full)
    elsewhere = f"export {VISIBLE}={free}" if free else "choose another machine"
    taken = "the first chip, npu:0" if free else "every chip"
    return Finding(
        f"device memory is in use ({'; '.join([*full.values()][:2])})",
        f"another process computes on {taken}, or one that ended left its memory behind",
        f"{elsewhere}, end it (`npu-smi info` lists processes), or lower cache.memory_fraction",
        "vllm-ascend #6002: calls that block during capture (107030) where memory is tight",
        is_fatal=False,
    )


def _old_driver_for_graphs(facts: MachineFacts) -> Finding | None:
    version = facts.driver_version
    if version is None or _three(version) >= (*CAPTURING_DRIVER, 1):
        return None
    return Finding(
        f"the driver is {version}; graphs want 25.5.1 or newer",
        "older drivers have too few streams to capture: Alloc sq cq fail, which reads like a full disk",
        "install Ascend HDK 25.5.1 or newer, or set device.graphs: 0",
        "vllm-ascend #8393",
        is_fatal=False,
    )


def _visible(facts: MachineFacts, devices: Sequence[Device]) -> dict[int, Device]:
    """Return the devices that the environment leaves visible, by index; the first is npu:0."""
    return {index: device for index, device in enumerate(devices) if facts.is_visible(index)}


def _three(version: str) -> tuple[int, int, int]:
    """Parse 25.5.1 as (25, 5, 1); a part that is not a number, such as RC1, counts as 0."""
    first, second = numbers(version) or (0, 0)
    rest = version.split(".")[2:]
    return first, second, int(rest[0]) if rest and rest[0].isdecimal() else 0


CHECKS: tuple[Check, ...] = (
    _no_linux,
    _no_driver,
    _no_device_in_container,
    _no_device,
    _no_control_node,
    _not_in_group,
    _no_permission,
    _closed_folder,
    _npu_smi_cannot_run,
    _npu_smi_fails,
    _unhealthy,
    _little_memory,
    _old_driver_for_graphs,
)
