"""The tensor ranks of a test: `python -m tests.models.tensor_rank BACKEND SIZE FOLDER`.

Each rank is a process, forked from one that has imported torch. It runs every case of FOLDER/cases.json, and
leaves what it computed and what it holds in FOLDER/CASE.RANK.pt: over gloo in plain torch, over hccl with an
NPU's operators. What ranks print is in FOLDER/printed.RANK.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention.divided import DividedAttention, DividedLatentAttention, shapes_of
from attention.int8_sparse import latent_attention
from attention.reference import Attention
from continuous_batching.batch import Batch, Sampled
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from devices.ascend_limits import BUFFER_MIB
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.groups import DType
from models.checkpoint import weights
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.logit_parts import LogitParts
from models.ops.reference import Ops
from models.parallel.group import Backend, Group, divided, dividing_pages, join
from models.parallel.share import Share
from models.quantization import Quantization
from models.sampling.follower import FollowerSampler
from models.sampling.sampler import Best, Chosen, Sampler
from models.step.runner import ModelRunner
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in
from recipes.machine import Npu
from tests.device_kinds import Kind, Way, machine
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from virtual_npu.launch_log import LaunchLog

PAGE_SIZE, NUM_PAGES = 16, 8
LENS = (41, 22)  # lengths of two requests, whose last tokens are computed one by one
STOPS = ((17, 5), (33, 14), *((33 + step, 14 + step) for step in range(1, 9)))  # one for each step
NUM_DECODED = 4  # ranks in processes of their own decode so many; the second request begins a page meanwhile
FIRST_STOPS = STOPS[: 2 + NUM_DECODED]
NUM_DRAWN = 5  # tokens that are drawn for each of them


@dataclass
class Kept:
    """Stands in for the sampler: keeps the logits of every step, which may be captured."""

    logits: list[Tensor] = field(default_factory=list)
    captures_draws, reads_logits = False, True

    def prepare(self, rows: np.ndarray, targets: np.ndarray, slots: SlotPool) -> None:
        """Nothing is chosen."""

    def start(
        self, logits: Tensor, rows: np.ndarray, targets: np.ndarray, slots: SlotPool, best: object = None
    ) -> Chosen:
        self.logits.append(logits.float().cpu())
        return Chosen(logits[:, 0].long(), lambda: Sampled(np.zeros(len(rows), np.int64)))

    def best(self, logits: Tensor, parts: LogitParts | None = None) -> Best:
        tokens = logits.argmax(-1)
        return Best(tokens, tokens)

    def draw_columns(self, rows: np.ndarray, targets: np.ndarray, slots: SlotPool) -> None:
        return None

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        raise AssertionError("no draw is captured")


def built(
    path: Path,
    group: Group,
    kind: Kind = "cpu",
    *,
    way: Way | None = None,
    int8_at_load: bool = False,
    dtype: DType = "float32",
    experts: int = 1,
    contexts: int = 1,
    dispatches: bool = False,
    int8_cache: bool = False,
    least_divided: int = 0,
) -> tuple[Decoder, int]:
    """The group's decoder of a checkpoint, and the bytes that this rank read; one that `dispatches` has its
    experts in another order.
    """
    config = config_in(path)
    is_sparse = config.latent is not None and config.latent.index is not None
    # Other attention of an NPU takes scales of channels alone
    has_rows = int8_cache and (is_sparse or (kind, way) != ("npu", "fused"))
    config = replace(config, dtype=dtype, int8_cache=int8_cache, scales_in_pages=has_rows)
    if dispatches:
        assert config.mixture is not None, "nothing else is sent to ranks"
        order = tuple(torch.randperm(config.mixture.num_experts, generator=torch.Generator().manual_seed(5)))
        placement = (tuple(map(int, order)),) * config.num_layers
        config = replace(config, mixture=replace(config.mixture, placement=placement))
    if int8_at_load:
        config = replace(config, quantization=Quantization(ignore=(), is_stored=False))
    decoder = empty(config, group, kind, way, experts, contexts)
    decoder.least_divided = least_divided
    if dispatches:
        product = decoder.ops.product  # type: ignore[attr-defined]  # an NPU's
        dtypes = *product.dtypes, "float32"  # which the stand-in takes here
        sends = {"dispatches": True, "dispatches_beside_shared": True}
        decoder.ops.product = replace(product, dtypes=dtypes, **sends)  # type: ignore[attr-defined]  # an NPU's
    return decoder, weights.load(decoder, path)


def page_size(config: DecoderConfig) -> int:
    """The tokens of a page; fused attention reads pages in int8 of 32 or more."""
    return 2 * PAGE_SIZE if config.int8_cache and not config.scales_in_pages else PAGE_SIZE


def empty(
    config: DecoderConfig,
    group: Group,
    kind: Kind = "cpu",
    way: Way | None = None,
    experts: int = 1,
    contexts: int = 1,
) -> Decoder:
    """The group's decoder before it has weights: in plain torch on the CPU, unless a way is named.

    Its experts are spread over so many parts of the group, and so many ranks divide a page, which has as many
    times the tokens.
    """
    share = Share(group.rank, group.size, experts=experts, contexts=contexts)
    shape = shape_of(contexts * page_size(config), share.part(config))
    kind_of = Attention if shape.latent is None else latent_attention
    is_plain = kind == "cpu" and way is None

    def operators(shape: AttentionShape) -> tuple[Ops, Attention]:
        return (Ops(), kind_of(shape)) if is_plain else machine(kind, way or "fused").operators(shape)

    if contexts == 1:
        return Decoder(config, *operators(shape), group, share)
    (ops, parts), (_, whole) = (operators(each) for each in shapes_of(shape, contexts))
    divides = DividedAttention if shape.latent is None else DividedLatentAttention
    attention = divides(shape, parts, whole, dividing_pages(group, contexts))
    attention.check()
    return Decoder(config, ops, attention, group, share)


def first_logits_of(decoder: Decoder, *, graphs: bool = False) -> Tensor:
    """Those of `logits_of` that ranks in processes of their own compute."""
    return logits_of(decoder, graphs=graphs, stops=FIRST_STOPS)


def logits_of(
    decoder: Decoder, *, graphs: bool = False, stops: tuple[tuple[int, ...], ...] = STOPS
) -> Tensor:
    """Logits [steps' rows, V] of two requests: prompts in chunks, then decodes of both."""
    slots, kept = table(decoder), Kept()
    runner = ModelRunner(decoder, cache_of(decoder), decoder.attention, kept, slots)
    if graphs:
        runner.capture(len(LENS))
    for each in stops:
        rows, after = np.arange(len(LENS)), np.array(each)
        runner.run(Batch(rows, slots.num_computed[rows], after, rows, rows, after))
        slots.num_computed[rows] = after
    return torch.cat(kept.logits)


def cache_of(decoder: Decoder) -> KVCache:
    """The pages of a rank."""
    part, attention = decoder.part, decoder.attention
    layers = [LayerPages(attention.new_planes)] * part.num_layers
    return KVCache(layers, attention.shape.page_size, [NUM_PAGES], indexed=attention.indexed)


def table(decoder: Decoder) -> SlotPool:
    """The rows of two requests that draw their tokens, with pages for all of them."""
    size = decoder.attention.shape.page_size
    slots = SlotPool(len(LENS), max(LENS) + NUM_DRAWN, size)
    rng, first_page = np.random.default_rng(3), 1
    for number, length in enumerate(LENS):
        vocab_size = decoder.config.vocab_size
        prompt = rng.integers(0, vocab_size, length).astype(np.int32)
        firsts = [-(-vocab_size // size) * rank for size in (2, 4) for rank in range(1, size)]
        ends = sorted({0, *firsts, *(first - 1 for first in firsts), vocab_size - 1})
        prompt[: len(ends)] = ends  # the first and the last token of each rank of two, and of four
        request = Request(str(number), prompt, SamplingParams(temperature=0.9, top_p=0.9, seed=number))
        request.number = number
        row, count = slots.take(request), -(-(length + NUM_DRAWN) // size)
        slots.page_table[row, :count] = range(first_page, first_page + count)
        first_page += count
    return slots


class Joins:
    """Stands in for a captured graph that joins logits, and for what joins them otherwise: counts."""

    def __init__(self, join: Callable[..., Any]) -> None:
        self._join, self.count = join, 0

    def replay(self, *own: Tensor) -> Any:
        self.count += 1
        return self._join(*own)


def greedy_of(decoder: Decoder, *, graphs: bool = False) -> tuple[Tensor, int]:
    """The best tokens [steps, 2], on every rank, and how often all ranks' logits were joined for them."""
    slots = table(decoder)
    slots.temperature[:] = 0
    runner = runner_of(decoder, slots, graphs=graphs)
    counted: list[Joins] = []
    if runner.graphs is not None:
        for size, step in runner.graphs.steps.items():
            if step.joins is not None:
                counted.append(Joins(step.joins.replay))
                runner.graphs.steps[size] = replace(step, joins=counted[-1])
    with ExitStack() as patches:
        if decoder.parts is not None:
            counted.append(Joins(decoder.parts.joined))
            patches.enter_context(mock.patch.object(decoder.parts, "joined", counted[-1].replay))
        tokens = stepped(runner, slots)
    return tokens, sum(each.count for each in counted)


def tokens_of(decoder: Decoder, *, graphs: bool = False) -> Tensor:
    """Tokens [steps, 2] that the leader draws, the host ahead of the device; nothing on other ranks."""
    slots = table(decoder)
    return stepped(runner_of(decoder, slots, graphs=graphs), slots)


def runner_of(decoder: Decoder, slots: SlotPool, *, graphs: bool) -> ModelRunner:
    """As an engine has it on this rank."""
    sampler = (
        FollowerSampler() if decoder.share.tensor else Sampler((), decoder.config.vocab_size, decoder.ops)
    )
    runner = ModelRunner(decoder, cache_of(decoder), decoder.attention, sampler, slots)
    if graphs:
        runner.capture(len(LENS))
    return runner


def stepped(runner: ModelRunner, slots: SlotPool) -> Tensor:
    """The tokens of the prompts' step and of those after it, each of which is begun before they are known."""
    rows, waits = np.arange(len(LENS)), []
    for number in range(NUM_DRAWN):
        stops = slots.num_computed + 1 if number else slots.num_prompt.copy()
        unknown = rows if number else rows[:0]
        batch = Batch(rows, slots.num_computed.copy(), stops, rows, rows, stops, unknown=unknown)
        waits.append(runner.start(batch))
        slots.num_computed[:] = stops
    return torch.from_numpy(np.array([wait().tokens for wait in waits]))


def launch_log() -> LaunchLog:
    """Return the stand-in's log of launches."""
    npu = machine("npu")
    assert isinstance(npu, Npu), "it is an NPU"
    assert npu.launch_log is not None, "the stand-in counts"
    return npu.launch_log


def joined_sums(decoder: Decoder) -> int:
    """From now on products are added up in one launch; returns how often in `first_logits_of`."""
    from models.ops.npu import ops as npu

    npu.LEAST_SUMMED_ROWS = 2  # the decodes of two rows, too
    ops, log = decoder.ops, launch_log()
    assert isinstance(ops, npu.NpuOps), "it is an operator of NPUs"
    ops.product = replace(ops.product, sums_products=True)
    with log.reading() as asked:
        first_logits_of(decoder)
    return sum(each.name == "npu::npu_mm_all_reduce_base" for each in asked)


def counted_logits_of(decoder: Decoder, *, graphs: bool) -> tuple[Tensor, Counter[str]]:
    """What `first_logits_of` gives, and the launches of torch_npu's operators meanwhile."""
    with launch_log().reading() as asked:
        logits = first_logits_of(decoder, graphs=graphs)
    names = (each.name for each in asked if each.name.startswith("npu::"))
    return logits, Counter(name.removeprefix("npu::") for name in names)


def held(decoder: Decoder) -> dict[str, Any]:
    """What each linear was packed to."""
    return {name: each.packed for name, each in decoder.named_modules() if hasattr(each, "packed")}


def collectives(group: Group, device: torch.device) -> dict[str, Tensor]:
    """What each method of a group makes of [[rank + 1, -rank]], and of a column, which is not contiguous."""

    def brought() -> Tensor:
        return torch.tensor([[group.rank + 1.0, -group.rank]], device=device)

    column = brought().repeat(3, 1)[:, :1]
    each = torch.arange(group.size, device=device)
    found = {
        "sum": group.all_reduce(brought()),
        "sum of a column": group.all_reduce(column),
        "largest": group.all_reduce_max(brought()),
        "all": group.all_gather(brought()),
        "all of a column": group.all_gather(column),
        "rows of the sum": group.reduce_scatter(brought().repeat(group.size, 1)),
        "one of each": group.exchange(10.0 * group.rank + each) - group.rank,
        "of the last": group.broadcast(brought(), group.size - 1),
    }
    return {name: tensor.cpu() for name, tensor in found.items()}


def store_of(rank: int, folder: Path) -> dist.TCPStore:
    """The store of all ranks: the first binds a free port and leaves its number in the folder."""
    place, timeout = folder / "port", timedelta(seconds=PATIENCE_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(place)
        return store
    end_s = time.monotonic() + PATIENCE_S
    while not place.exists():
        assert time.monotonic() < end_s, "rank 0 has no store"
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, timeout=timeout)


def main(backend: Backend, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    kind: Kind = "cpu" if backend == "gloo" else "npu"
    device = torch.device("cpu" if kind == "cpu" else machine(kind).device)
    store = store_of(rank, folder)
    group = join(backend, store, rank, size, PATIENCE_S)
    torch.save(collectives(group, device), folder / f"collectives.{rank}.pt")
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        graphs, joins, chooses = (case.pop(name, False) for name in ("graphs", "joins", "chooses"))
        share = Share(rank, size, experts=case.get("experts", 1), contexts=case.get("contexts", 1))
        divided(group, share)
        group.open_for_tokens(BUFFER_MIB if case.get("dispatches") else 0, device)
        decoder, num_bytes = built(Path(case.pop("path")), group, kind, **case)
        found: dict[str, Any] = {"bytes": num_bytes}
        if joins:
            found["joined"] = joined_sums(decoder)
        if case.get("dispatches"):
            found["logits"], found["launches"] = counted_logits_of(decoder, graphs=graphs)
        else:
            found["logits"] = first_logits_of(decoder, graphs=graphs)
        if chooses:
            found["greedy"], found["gathered"] = greedy_of(decoder, graphs=graphs)
            found["tokens"] = tokens_of(decoder, graphs=graphs)
        if kind == "cpu" and decoder.config.quantization is not None:
            found["held"] = held(decoder)
        torch.save(found, folder / f"{name}.{rank}.pt")
    dist.destroy_process_group()
    store.set(f"ended {rank}", "")
    if rank == 0:  # the store ends with it
        store.wait([f"ended {each}" for each in range(size)])


def forked(backend: Backend, rank: int, size: int, folder: Path) -> int:
    """The process of a rank, which prints into a file of its own."""
    process = os.fork()
    if process:
        return process
    with (folder / f"printed.{rank}").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        main(backend, rank, size, folder)
        status = 0
    except BaseException:  # noqa: BLE001 - it must not go on as the process that it was forked from
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(backend: Backend, size: int, folder: Path) -> int:
    """Run all ranks; the first one that fails ends the others, and its status is returned."""
    if backend == "hccl":  # parts of torch that torch_npu imports, and that start nothing
        importlib.import_module("torch.distributed.tensor")
    ranks = {forked(backend, rank, size, folder) for rank in range(size)}
    status = 0
    while ranks:
        process, code = os.wait()
        ranks.remove(process)
        if code and not status:
            status = 1
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))  # type: ignore[arg-type]  # a kind
