"""Define the laws of the machine that a result names.

The device's name, its profile, the versions of libraries, the kind of device in the recipe and the operators
that ran must be of one machine. A simulated result says that it is one; its machine is not described.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from devices.profile import load, named

ACCELERATORS = {"npu": "Ascend", "cuda": "NVIDIA"}  # names that devices of a kind report
HERE = ("127.0.0.1", "localhost", "::1")
SAME_MACHINE = ("cpu", "cores", "python")


def kind_of(device: str) -> str:
    """Return the kind of device that has such a name."""
    return next((kind for kind, name in ACCELERATORS.items() if name.lower() in device.lower()), "cpu")


def one_machine(figures: Figures) -> str | None:
    """Check that device, profile, versions, recipe and operators agree."""
    machine = figures.raw("machine")
    if not isinstance(machine, dict) or figures.raw("SIMULATED") is not None:
        raise NotCheckable("no machine is named, or it was simulated")
    wrongs: list[str | None] = []
    device = str(machine.get("device") or "a CPU")
    kind = kind_of(device)
    virtual = figures.raw("computed_on.virtual") or figures.raw("settings.device.virtual")
    if kind == "npu" and "torch_npu" not in machine and not virtual:
        wrongs.append(f"machine.device is {device!r}, but machine has no torch_npu, without which none runs")
    if kind == "cuda" and str(machine.get("torch", "")).endswith("+cpu"):
        wrongs.append(f"machine.device is {device!r}, but torch is {machine['torch']}, which has no CUDA")
    for name in ("computed_on.kind", "settings.device.kind"):
        asked = figures.raw(name)
        if asked is not None and asked != kind and not virtual:
            wrongs.append(f"machine.device is {device!r}, of kind {kind}, but {name} is {asked}")
    attention = figures.raw("computed_on.attention")
    if attention is not None:
        ran = next((each for each in ("npu", "cuda", "cpu") if f".{each}." in f".{attention}."), None)
        if ran is not None and ran != kind and not virtual:
            wrongs.append(f"machine.device is {device!r}, of kind {kind}, but {attention} computed attention")
    profile = figures.raw("device_profile")
    if profile is not None:
        load(str(profile))  # raises ValueError for a profile that does not exist
        expected = named(str(machine.get("cpu"))) if kind == "cpu" and not virtual else named(device)
        if profile != expected:
            wrongs.append(f"device_profile is {profile!r}, but {device!r} has {expected!r}")
    if kind == "cpu" and not virtual and (count := figures.given("num_devices")) is not None:
        wrongs.append(differs("num_devices", count, "the CPUs that an engine runs on", 1, 0))
    return first(wrongs)


def same_machine(figures: Figures) -> str | None:
    """Check that a server at a loopback address names the client's machine."""
    url, server, ours = figures.raw("base_url"), figures.raw("server"), figures.raw("machine")
    theirs = server.get("machine") if isinstance(server, dict) else None
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        raise NotCheckable("the server does not name its machine")
    if urlsplit(str(url)).hostname not in HERE:
        raise NotCheckable("the server may run on another machine")
    return first(
        [
            f"machine.{name} is {ours.get(name)!r}, but server.machine has {theirs[name]!r}, at {url}"
            for name in SAME_MACHINE
            if name in theirs and ours.get(name) != theirs[name]
        ]
    )


def memory(figures: Figures) -> str | None:
    """Check that weights and pages fit the device's memory and, on a CPU, weights fit the process."""
    there = figures.positive("computed_on.memory_gib") * 2**30
    weights = figures.number("weight_bytes_per_step")
    pages = figures.number("page_bytes") * figures.number("num_pages")
    wrongs = [exceeds("weights + pages", weights + pages, "computed_on.memory_gib", there, 0)]
    if figures.raw("computed_on.kind") == "cpu" and (peak := figures.given("peak_rss_gib")) is not None:
        wrongs.append(exceeds("weight_bytes_per_step", weights, "peak_rss_gib", peak * 2**30, 0))
    return first(wrongs)


LAWS = (
    Law(
        "machine",
        "device, profile, versions, recipe and operators are of one machine",
        one_machine,
        "machine",
    ),
    Law("server's machine", "a server on this machine has its processor", same_machine, "server"),
    Law("memory", "weights and pages fit into the device's memory", memory, "computed_on"),
)
