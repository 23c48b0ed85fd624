"""One rank of a test of collectives: `python -m tests.virtual_npu.hccl_rank RANK SIZE FOLDER MODE`.

It checks what it got, and prints what it was refused, a line each.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virtual_npu.device import start

start("Ascend910B1", 1 << 30)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

npu = torch.get_device_module("npu")
RANK, SIZE, FOLDER, MODE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)
LENS = (1, 7, 2**20 + 3)  # the last goes in pieces


def of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings."""
    drawn = torch.randint(-9, 9, (count,), generator=torch.Generator().manual_seed(rank))
    return (drawn / (1 if not dtype.is_floating_point else 8)).to(dtype)


def say(line: str) -> None:
    """Print it, apart from what the log has."""
    print(f"rank: {line}", flush=True)


def here(tensor: Tensor) -> Tensor:
    return tensor.to("npu:0")


def same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.cpu(), expected), (found.cpu(), expected)


def name_of(group: dist.ProcessGroup) -> str:
    """By which an operator finds its communicator."""
    backend: Any = group._get_backend(torch.device("npu"))  # torch_npu's, which has more methods than torch's
    return str(backend.get_hccl_comm_name(RANK))


def collectives(count: int, dtype: torch.dtype) -> None:
    """Each against what torch says on the CPU, of the values of all ranks, which every rank can make."""
    brought = [of(rank, count, dtype) for rank in range(SIZE)]
    whole = [of(rank, count * SIZE, dtype) for rank in range(SIZE)]
    wide = torch.stack([each.double() if dtype.is_floating_point else each.long() for each in brought])
    for operation, expected in (
        (dist.ReduceOp.SUM, wide.sum(0)),
        (dist.ReduceOp.MAX, wide.amax(0)),
        (dist.ReduceOp.MIN, wide.amin(0)),
    ):
        mine = here(brought[RANK])
        dist.all_reduce(mine, operation)
        same(mine, expected.to(dtype))
    for root in range(SIZE):
        mine = here(brought[RANK])
        dist.broadcast(mine, root)
        same(mine, brought[root])
        mine = here(brought[RANK])
        dist.reduce(mine, root)
        if root == RANK:
            same(mine, wide.sum(0).to(dtype))
    gathered = torch.empty(SIZE * count, dtype=dtype, device="npu:0")
    dist.all_gather_into_tensor(gathered, here(brought[RANK]))
    same(gathered, torch.cat(brought))
    part = torch.empty(count, dtype=dtype, device="npu:0")
    dist.reduce_scatter_tensor(part, here(whole[RANK]))
    summed = torch.stack([each.double() for each in whole]).sum(0)
    same(part, summed[RANK * count : (RANK + 1) * count].to(dtype))
    swapped = torch.empty(SIZE * count, dtype=dtype, device="npu:0")
    dist.all_to_all_single(swapped, here(whole[RANK]))
    same(swapped, torch.cat([each[RANK * count : (RANK + 1) * count] for each in whole]))


def uneven() -> None:
    """Rank a sends a + b elements to rank b."""
    sent = [RANK + to for to in range(SIZE)]
    mine = of(RANK, sum(sent), torch.float32)
    received = torch.empty(sum(sent), device="npu:0")
    dist.all_to_all_single(received, here(mine), sent, sent)
    parts = [
        of(rank, sum(rank + to for to in range(SIZE)), torch.float32).split(
            [rank + to for to in range(SIZE)]
        )[RANK]
        for rank in range(SIZE)
    ]
    same(received, torch.cat(parts))


def passed_on() -> None:
    """A ring, in which all send before any receives, and a chain of one after the other."""
    count = 2**18 + 1
    to, from_ = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    received = torch.empty(count, device="npu:0")
    both = [
        dist.P2POp(dist.isend, here(of(RANK, count, torch.float32)), to),
        dist.P2POp(dist.irecv, received, from_),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    same(received, of(from_, count, torch.float32))
    if RANK:
        dist.recv(received, RANK - 1)
    if RANK < SIZE - 1:
        dist.send(here(of(0, count, torch.float32)) if not RANK else received, RANK + 1)
    if RANK:
        same(received, of(0, count, torch.float32))


def captured() -> None:
    """A graph with collectives inside, replayed with other values, and destroyed."""
    x = torch.ones(6, device="npu:0")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    for value in (1.0, 5.0):
        x.fill_(value + RANK)
        graph.replay()
        npu.synchronize()
        same(z, torch.full((6,), 2 * sum(value + rank for rank in range(SIZE)) + 1))
    graph.reset()


def groups() -> None:
    """Those of even and of odd ranks, at once."""
    made = [dist.new_group(list(range(first, SIZE, 2))) for first in (0, 1)]
    mine = here(torch.tensor([float(RANK)]))
    dist.all_reduce(mine, group=made[RANK % 2])
    same(mine, torch.tensor([float(sum(range(RANK % 2, SIZE, 2)))]))


def multiplied() -> None:
    """Each rank has a part of the inner axis; the device's own queue may hold the call back, or a graph."""
    import torch_npu

    assert dist.group.WORLD is not None, "this rank has joined"
    name = name_of(dist.group.WORLD)
    rows, parts = zip(
        *((of(rank, 3 * 8, torch.float32), of(9 + rank, 8 * 5, torch.float32)) for rank in range(SIZE))
    )
    expected = sum((one.view(3, 8) @ other.view(8, 5) for one, other in zip(rows, parts)), torch.zeros(3, 5))
    x1, x2 = here(rows[RANK].view(3, 8)).bfloat16(), here(parts[RANK].view(8, 5)).bfloat16()
    same(torch_npu.npu_mm_all_reduce_base(x1, x2, name), expected.bfloat16())
    graph = npu.NPUGraph()
    with npu.graph(graph):
        y = torch_npu.npu_mm_all_reduce_base(x1, x2, name)
    x1.mul_(2)
    graph.replay()
    npu.synchronize()
    same(y, 2 * expected.bfloat16())
    graph.reset()


def dispatched() -> None:
    """Experts that multiply by their number, two on each rank; at once, and in a graph with other tokens."""
    import torch_npu

    group, held, tokens, rest = dist.new_group(list(range(SIZE))), 2, 5, torch.Generator().manual_seed(RANK)
    name, number = name_of(group), 2 * SIZE
    x = here(torch.randn(tokens, 32, generator=rest)).bfloat16()
    ids = here(torch.stack([torch.randperm(number, generator=rest)[:3] for _ in range(tokens)]).int())
    weights = here(torch.rand(tokens, 3, generator=rest))
    of_group = {"group_ep": name, "ep_world_size": SIZE, "ep_rank_id": RANK, "moe_expert_num": number}
    of_group["comm_alg"] = "fullmesh"

    def computed() -> torch.Tensor:
        rows, _, notes, counts, sent, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(x, ids, **of_group)
        last = counts.cumsum(0)
        expert = (torch.arange(len(rows), device=x.device)[:, None] >= last).sum(1) + held * RANK
        made = rows * (1 + expert)[:, None].bfloat16()
        combined: Tensor = torch_npu.npu_moe_distribute_combine_v2(
            made, ids, notes, sent, weights, **of_group
        )
        return combined

    def expected() -> torch.Tensor:
        made = x[:, None] * (1 + ids)[..., None].bfloat16()
        return (made.float() * weights[..., None]).sum(1).bfloat16().cpu()

    same(computed(), expected())
    graph = npu.NPUGraph()
    with npu.graph(graph):
        y = computed()
    x.mul_(-3)
    weights.add_(1)
    ids.copy_(ids.flip(0))
    graph.replay()
    npu.synchronize()
    same(y, expected())
    graph.reset()


def refused(call: Callable[[], object]) -> None:
    """Say why a call is refused."""
    try:
        call()
        npu.synchronize()
    except RuntimeError as error:
        line = next((each for each in str(error).splitlines() if "virtual NPU:" in each), str(error))
        say(line.split("virtual NPU: ")[-1])
    else:
        say("was not refused")


def differs(group: dist.ProcessGroup) -> None:
    refused(lambda: dist.all_reduce(torch.ones(4 + RANK, device="npu:0"), group=group))


def differs_in_product(group: dist.ProcessGroup) -> None:
    import torch_npu

    one, name = torch.ones(4, 4, device="npu:0").bfloat16(), name_of(group)
    refused(
        lambda: (
            dist.all_reduce(one, group=group) if RANK else torch_npu.npu_mm_all_reduce_base(one, one, name)
        )
    )


def mixed(group: dist.ProcessGroup) -> None:
    """Tokens through the communicator that has other collectives, too."""
    import torch_npu

    dist.all_reduce(torch.ones(1, device="npu:0"), group=group)
    x, ids = torch.ones(2, 32, device="npu:0").bfloat16(), torch.zeros(2, 1, device="npu:0").int()
    of_group = (name_of(group), SIZE, RANK, SIZE)
    refused(lambda: torch_npu.npu_moe_distribute_dispatch_v2(x, ids, *of_group, comm_alg="fullmesh"))


def killed() -> None:
    dist.all_reduce(torch.ones(1, device="npu:0"))
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    refused(lambda: dist.all_reduce(torch.ones(4, device="npu:0")))


def stopped() -> None:
    dist.broadcast(torch.ones(3, device="npu:0"), 0)
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    refused(lambda: dist.all_reduce(torch.ones(4, device="npu:0")))


def right() -> None:
    for dtype in DTYPES:
        for count in LENS if dtype == torch.float32 else LENS[:2]:
            collectives(count, dtype)
    for case in (uneven, passed_on, captured, groups, dispatched):
        case()
    dist.barrier()
    say("all right")


def wrong() -> None:
    """Of two ranks: a right product, and what is refused, each in a group that nothing else has spoilt."""
    multiplied()
    for case in (differs, differs_in_product, mixed):
        case(dist.new_group([0, 1]))
    killed()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("hccl", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=SIZE)
    {each.__name__: each for each in (right, wrong, stopped)}[MODE]()
    os._exit(0)  # the group's watchdog may wait for ranks that are gone
