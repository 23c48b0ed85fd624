"""Run collectives over the ranks that compute one model together.

They go over torch.distributed: gloo between processors, NCCL between GPUs, HCCL between NPUs. All ranks must
call the same methods in the same order with tensors of the same shape.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from borders.numbers import integers
from models.parallel.share import Share

Backend = Literal["gloo", "nccl", "hccl"]
BACKENDS: dict[str, Backend] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # keyed by the kind of device
# The first name is that of torch 2.13 and later; older releases, which older CANN needs, have the second
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The range, in seconds, of HCCL's variables. The first 910 waits for a multiple of 68 s, and never less
# (https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0078.html)
HCCL_RANGES_S = {"HCCL_EXEC_TIMEOUT": (1, 17340), "HCCL_CONNECT_TIMEOUT": (120, 7200)}

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for a machine and its containers
# Names the HCCL variables that were set here and not by the user
_SET_HCCL = "CONTINUOUS_BATCHING_SET_HCCL"
UNLIMITED = timedelta(days=365)
HCCL_FIRST_S = 10.0  # margin in which HCCL reports what it waits for before torch_npu's watchdog does

log = logging.getLogger(__name__)


class Group:
    """The ranks of a process group, in which this process is `rank`, counted from 0.

    `inside` names the method that the host is in, so that a hanging rank can be located. `few` are those of
    its ranks that divide the same experts, if that is neither all nor one of them; `neighbours` are those
    that divide the pages of the cache, if there are several. `tokens` are all ranks if
    each has experts of its own, over HCCL: nothing else goes through that communicator, each of whose buffers
    has `buffer_mib` MiB once it is open for tokens.
    """

    inside = ""
    few: Group | None = None
    neighbours: Group | None = None
    tokens: Group | None = None
    buffer_mib = 0
    timeout_s = 0.0  # how long a collective waits; process groups of some of the ranks wait as long
    store: dist.Store | None = None  # the store through which the ranks have joined

    def __init__(
        self,
        ranks: dist.ProcessGroup,
        few: Group | None = None,
        tokens: Group | None = None,
        neighbours: Group | None = None,
    ) -> None:
        self._ranks, self.few, self.tokens, self.neighbours = ranks, few, tokens, neighbours
        self.rank, self.size = ranks.rank(), ranks.size()
        self._hccl_name: str | None = None
        self._is_near: bool | None = None
        self._num_met = self._num_from_leader = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, in place if `x` is contiguous."""
        x = x.contiguous()
        self.inside = "all_reduce"
        dist.all_reduce(x, group=self._ranks)
        self.inside = ""
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of `x` over all ranks, in place if `x` is contiguous."""
        x = x.contiguous()
        self.inside = "all_reduce_max"
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self._ranks)
        self.inside = ""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather [...] of each rank into [ranks, ...] on all of them."""
        gathered = x.new_empty(self.size, *x.shape)
        self.inside = "all_gather"
        # A list would make torch_npu call other operators
        _gather_into(gathered.flatten(0, 1), x.contiguous(), group=self._ranks)
        self.inside = ""
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows [t, ...] of the sum of `x` [ranks * t, ...] over all ranks."""
        own = x.new_empty(len(x) // self.size, *x.shape[1:])
        self.inside = "reduce_scatter"
        _scatter_sum(own, x.contiguous(), group=self._ranks)
        self.inside = ""
        return own

    def exchange(self, x: Tensor) -> Tensor:
        """Send part r of `x` [ranks, ...] to rank r; return [ranks, ...], what each rank has sent here."""
        received = x.new_empty(x.shape)
        self.inside = "exchange"
        dist.all_to_all_single(received, x.contiguous(), group=self._ranks)
        self.inside = ""
        return received

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return rank `root`'s `x`, in place; `x` is contiguous."""
        self.inside = "broadcast"
        dist.broadcast(x, group_src=root, group=self._ranks)
        self.inside = ""
        return x

    def send(self, x: Tensor, rank: int) -> None:
        """Send `x` to another rank, and wait until it has it."""
        dist.send(x, group=self._ranks, group_dst=rank)

    def receive(self, x: Tensor, rank: int) -> Tensor:
        """Receive into `x` what another rank has sent."""
        dist.recv(x, group=self._ranks, group_src=rank)
        return x

    def on_hosts(self) -> Group:
        """Return the same ranks over gloo, for what lies in the hosts' memory and beside collectives.

        All ranks must call it at the same time.
        """
        wait = timedelta(seconds=self.timeout_s)
        return Group(dist.new_group(range(self.size), timeout=wait, backend="gloo"))

    def meet(self, name: str) -> None:
        """Wait on the host until all ranks have reached this point; `name` is its name in messages.

        HCCL limits how long a device waits; ranks that load their weights at different speeds do not reach
        that limit, because they wait here. The wait has no limit of its own: whoever watches the ranks ends
        them, when one is lost or their start stops to progress.
        """
        assert self.store is not None, "these ranks have joined through a store"
        self._num_met += 1
        ours = [f"meeting/{self._num_met}/{rank}" for rank in range(self.size)]
        self.inside = name
        self.store.set(ours[self.rank], "")
        self.store.wait(ours, UNLIMITED)
        self.inside = ""

    def from_leader(self, make: Callable[[], str], name: str) -> str:
        """Return on all ranks what rank 0 makes on its host; `name` is the wait's name in messages."""
        assert self.store is not None, "these ranks have joined through a store"
        self._num_from_leader += 1
        key = f"leader/{self._num_from_leader}"
        if self.rank == 0:
            self.store.set(key, make())
        self.inside = name
        self.store.wait([key], UNLIMITED)
        self.inside = ""
        return str(self.store.get(key).decode())

    @property
    def hccl_name(self) -> str:
        """HCCL's name for these ranks, for operators that communicate themselves.

        All ranks must read it for the first time together, since that creates the communicator, and not while
        a graph is captured.
        """
        if self._hccl_name is None:
            # A backend of torch_npu has more methods than torch knows
            backend: Any = self._ranks._get_backend(torch.device("npu"))
            self._hccl_name = backend.get_hccl_comm_name(self.rank)
        return self._hccl_name

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on one machine; they must read it for the first time together."""
        if self._is_near is None:
            device, here = torch.device("npu"), zlib.crc32(_BOOT.read_bytes()) >> 1
            self._is_near = self.least(here, device) == -self.least(-here, device)
        return self._is_near

    def open_for_tokens(self, buffer_mib: int, device: torch.device) -> None:
        """Create the communicator of tokens, if all ranks are on one machine and each has buffers.

        All ranks must call it together, before memory is measured, because the buffers are device memory.
        """
        if self.tokens is None:
            return
        least = self.least(buffer_mib, device)
        if least and self.is_on_one_machine:
            self.tokens.buffer_mib = least
            _ = self.tokens.hccl_name

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of all ranks' values of at most 31 bits, on the host of each of them."""
        return -int(self.all_reduce_max(torch.tensor([-value], dtype=torch.int32, device=device)))


class Alone(Group):
    """A group of one rank that holds everything: nothing is communicated or copied."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x

    def meet(self, name: str) -> None:
        return

    def from_leader(self, make: Callable[[], str], name: str) -> str:
        return make()

    def least(self, value: int, device: torch.device) -> int:
        return value


ALONE = Alone()


def sharing_experts(group: Group, size: int) -> Group:
    """Return the ranks that divide the same experts, which are `size` of a group."""
    if size in (1, group.size):
        return ALONE if size == 1 else group
    assert group.few is not None, "a group is divided before a decoder is made"
    assert group.few.size == size, f"parts of {group.few.size} ranks, and {size} divide an expert"
    return group.few


def dividing_pages(group: Group, size: int) -> Group:
    """Return the ranks that divide the same pages of the cache, which are `size` of a group."""
    if size == 1:
        return ALONE
    assert group.neighbours is not None, "a group is divided before a decoder is made"
    assert group.neighbours.size == size, f"parts of {group.neighbours.size} ranks, and {size} divide a page"
    return group.neighbours


class StageLinks:
    """The links of activations between pipeline stages: this rank's neighbours among all ranks, if any.

    `inside` is as in a group.
    """

    inside = ""

    def __init__(self, before: int | None = None, after: int | None = None) -> None:
        self._before, self._after = before, after
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._hosts: Group = ALONE
        self._other_end = 0

    def open_for_drafts(self, world: Group, share: Share) -> None:
        """Let the last stage send drafts to the first, each rank to the one with the same part of the layers.

        They go from host to host: the device of the last stage has not yet received what the first has sent
        it before, and would wait with its own. All ranks must call this at the same time.
        """
        way = share.tensors * (share.stages - 1)
        self._hosts, self._other_end = world.on_hosts(), world.rank + (way if share.is_last else -way)

    def receive(self, x: Tensor) -> Tensor:
        """Receive into `x` what the stage before has sent."""
        self.inside = "receive"
        dist.recv(x, self._before)
        self.inside = ""
        return x

    def send(self, x: Tensor) -> None:
        """Start to send `x` to the next stage without waiting, once the previous send has completed."""
        self.inside = "send"
        if x.device.type != "cpu":  # the stream waits and not the host, and a captured step has no other way
            dist.send(x, self._after)
        else:
            for before, _ in self._sending:
                before.wait()
            work = dist.isend(x, self._after)
            self._sending = [] if work is None else [(work, x)]
        self.inside = ""

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafts on the host from the last stage to the first, and wait until it has them."""
        self.inside = "send_drafts"
        self._hosts.send(drafts, self._other_end)
        self.inside = ""

    def receive_drafts(self, room: Tensor) -> Tensor:
        """Receive into `room`, on the host of the first stage, the drafts of the last."""
        self.inside = "receive_drafts"
        self._hosts.receive(room, self._other_end)
        self.inside = ""
        return room


NO_LINKS = StageLinks()


def join(backend: Backend, store: dist.Store, rank: int, size: int, timeout_s: float) -> Group:
    """Return the group of `size` processes, once all of them have joined through one store.

    A collective that some rank does not call within `timeout_s` is an error on the others. `dist` allows one
    such group in a process; `dist.destroy_process_group` leaves it. HCCL variables that the user has set are
    kept.
    """
    timeout_s = watchdog_s(timeout_s) if backend == "hccl" else timeout_s
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    assert dist.group.WORLD is not None, "it was just made"
    group = Group(dist.group.WORLD)
    group.store, group.timeout_s = store, timeout_s
    return group


def divided(world: Group, share: Share) -> tuple[Group, StageLinks]:
    """Return the ranks of this rank's stage, and the links to the others.

    All ranks must call it at the same time.
    """
    size, rank, few, tokens, neighbours = share.tensors, world.rank, None, None, None
    wait = timedelta(seconds=world.timeout_s)

    def in_parts(size: int) -> list[Any]:
        return [dist.new_group(range(at, at + size), timeout=wait) for at in range(0, world.size, size)]

    _, sharing = share.of_an_expert
    if 1 < sharing < size:
        few = Group(in_parts(sharing)[rank // sharing])
    if 1 < size == share.experts and dist.get_backend() == "hccl":
        tokens = Group(in_parts(size)[rank // size])
    if 1 < share.contexts < size:
        neighbours = Group(in_parts(share.contexts)[rank // share.contexts])
    if share.stages == 1:
        world.few, world.tokens = few, tokens
        world.neighbours = world if share.contexts == size > 1 else neighbours
        return world, NO_LINKS
    groups = in_parts(size)
    before = None if share.is_first else rank + size  # the last stage has the first ranks
    after = None if share.is_last else rank - size
    own = groups[rank // size]
    if size == 1:
        return ALONE, StageLinks(before, after)
    group = Group(own, few, tokens, neighbours)
    group.neighbours = group if share.contexts == size else neighbours
    return group, StageLinks(before, after)


def watchdog_s(timeout_s: float) -> float:
    """Tell HCCL how long its collectives wait; return how long torch_npu's watchdog waits for them.

    The watchdog ends a process without naming a rank, so it waits longer than HCCL.
    """
    hccl_s = tell_hccl(timeout_s)
    return max(timeout_s, hccl_s) + HCCL_FIRST_S if hccl_s else UNLIMITED.total_seconds()


def hccl_timeouts(timeout_s: float) -> dict[str, str]:
    """Return the variables that set HCCL's time limits, as near to `timeout_s` as it allows."""
    ranges = HCCL_RANGES_S.items()
    return {name: str(min(max(least, math.ceil(timeout_s)), most)) for name, (least, most) in ranges}


def tell_hccl(timeout_s: float) -> float:
    """Set HCCL's time limits unless the user has; return how long its collectives wait then, 0 for ever."""
    # Set by an earlier engine of this process, or by its parent
    ours = os.environ.get(_SET_HCCL, "").split()
    for name, seconds in hccl_timeouts(timeout_s).items():
        said = os.environ.get(name)
        if said is None or name in ours:
            os.environ[name] = seconds
            ours = [*ours, name]
        elif integers(1, int(seconds) - 1).parse(said):  # 0 means no limit
            log.warning(
                "%s=%s stays: ranks that start further apart than that end, though parallel.start_timeout_s"
                " allows %s s; unset it to let the recipe say",
                *(name, said, seconds),
            )
    os.environ[_SET_HCCL] = " ".join(sorted(set(ours)))
    return float(integers(0, 2**31).parse(os.environ["HCCL_EXEC_TIMEOUT"]) or 0)
