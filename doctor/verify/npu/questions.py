"""Ask a single device the questions that only hardware can answer.

Legend of a call of attention: H query heads, K key and value heads, D head dim, S spans.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.reference import Attention, StaticDecodes
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from devices.ascend_limits import FRACTAL_NZ, WIDE_HEAD, AscendProduct
from devices.shapes import AttentionShape
from models.layers.dtypes import TORCH_DTYPES
from models.ops.reference import Ops
from models.sampling.sampler import Sampler
from recipes.machine import Npu

Found = tuple[bool, str]  # the answer, and what it was judged by

HEADS, DIM, PAGE = 8, 128, 128
MASK_SIDE = 2048  # side of the one mask of sparse_mode 3
# Largest distance of two rows that are right, relative to the length of one: an eighth of it is bfloat16's
# rounding of each number. A row of attention over 2,000 random keys is more than twice as far if one is lost.
NEAR = 0.01
WEIGHTS = 12  # number of weights of 32 MiB: together more than the L2 cache of 192 MiB
EXPERT = 1408  # columns of a shared expert
SIDE, ROWS, CALLS = 4096, (1, 32), 50  # sizes and number of the products that are timed
VOCABULARY = 151_936
# (temperature, top_k, top_p) of each row.
DRAWN = [(0.8, 0, 0.9), (1.0, 20, 1.0), (0.7, 50, 0.5), (0.0, 0, 1.0)]
MOST_POSITION, NEAR_ANGLE = 131072, 1e-5


@dataclass(frozen=True, slots=True)
class Probe:
    """A question about a product; its name is the field of the product's limits that follows the answer."""

    name: str
    question: str
    applies: Callable[[AscendProduct], bool]
    ask: Callable[[Npu], Found]


class NotCaptured(RuntimeError):
    """A graph does not take the call that is asked about, which is a no."""


# torch_npu refuses what it cannot capture in words; a stream or a copy that would be waited for has a code.
UNCAPTURED = re.compile(r"error code is (107027|107030)\b|^(?!.*error code is).*captur", re.DOTALL)


@contextmanager
def captured(graph: Any) -> Iterator[None]:
    """Capture what is called; raises NotCaptured if the device captures no such calls.

    Any other error is one of the device. The end of a capture that an error broke off raises another one.
    """
    npu = torch.get_device_module("npu")
    before = npu.current_stream()
    try:
        with npu.graph(graph):
            yield
    except (RuntimeError, ValueError) as error:
        npu.set_stream(before)  # a capture that cannot be ended leaves its own
        if UNCAPTURED.search(said := first_of(error)):
            raise NotCaptured(said) from error
        raise


# Errors of the device itself, after which it may not compute in this process: of the runtime, and of memory
_LOST = re.compile(r"error code is (507|107)\d{3}\b|out of memory", re.IGNORECASE)


def is_refusal(error: RuntimeError) -> bool:
    """Whether an error refuses a call or its capture, as one that CANN lacks, and the device goes on."""
    lost = isinstance(error, torch.OutOfMemoryError) or _LOST.search(first_of(error)) is not None
    return isinstance(error, NotCaptured) or not lost


def first_of(error: BaseException) -> str:
    """Return the text of the error that came first, of those that came while it was handled."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


def rows_apart(found: Tensor, wanted: Tensor) -> float:
    """Return how far any row [..., D] is from the wanted one, relative to that; a NaN is infinitely far."""
    found, wanted = found.cpu().float(), wanted.cpu().float()
    lengths = wanted.norm(dim=-1).clamp_min(1e-20)
    return furthest((found - wanted).norm(dim=-1) / lengths)


def furthest(distances: Tensor) -> float:
    """Return the largest of some distances; a NaN is infinitely far."""
    return float(distances.nan_to_num(nan=torch.inf).max())


def keeps_nan(machine: Npu) -> Found:
    """Ask whether a maximum keeps a NaN, for each dtype, in the first, a middle and the last place."""
    bad = []
    for dtype in (*map(TORCH_DTYPES.__getitem__, machine.product.dtypes), torch.float32):
        logits = torch.randn(3, VOCABULARY).to(dtype)
        for row, place in enumerate((0, 70_000, -1)):
            logits[row, place] = torch.nan
        best = logits.to(machine.device).max(-1)[0].cpu()
        bad += [f"{dtype} {best.tolist()}"] if not bool(best.isnan().all()) else []
    return not bad, "; ".join(bad) or "the maximum is NaN in every type"


def packs_float16(machine: Npu) -> Found:
    """Ask whether packed attention over a prompt, a chunk and a decode is right in float16.

    It is asked with as many key heads as query heads and with fewer, in one call, or in as many calls as
    attention makes of the spans where the product does not accept them together.
    """
    spans = [(300, 300), (40, 500), (1, 260)]
    cuts = machine.product.cuts(np.array([queries for queries, _ in spans]))
    far = max(
        attention_apart(machine, torch.float16, spans[first:last], kv_heads)
        for first, last in cuts
        for kv_heads in (HEADS, 2)
    )
    return far <= NEAR, f"{far:.2g} from float32"


def reads_wide_heads(machine: Npu) -> Found:
    """Ask whether attention by wide heads is right for prompts, chunks, drafts and decodes of one step.

    It is compared with plain torch on the host, in float32 over the same pages. Decodes are asked for in a
    graph, too, whose replay has other lengths than its capture.
    """
    from attention.npu.single_queries import WideHeadAttention

    npu, dtype = torch.get_device_module("npu"), TORCH_DTYPES[machine.product.dtypes[0]]
    stops, lens = np.array([300, 500, 260, 131, 64]), np.array([300, 40, 1, 3, 1])
    table = 1 + np.arange(4 * len(stops), dtype=np.int32).reshape(len(stops), 4)
    far = []
    for heads, kv_heads in ((16, 2), (8, 8)):
        shape = AttentionShape(heads, kv_heads, WIDE_HEAD, PAGE, 1 / math.sqrt(WIDE_HEAD), dtype, (None,))
        wide = WideHeadAttention(shape, machine.device, machine.product)
        plain = Attention(replace(shape, dtype=torch.float32))
        keys, values = (torch.randn(1 + table.size, PAGE, kv_heads, WIDE_HEAD).to(dtype) for _ in range(2))
        for some in (slice(None), slice(4, 5)):
            spans = np.arange(len(stops))[some], (stops - lens)[some], stops[some]
            batch = Batch(*spans, *(np.empty(0, np.int64),) * 3)
            unwritten = np.zeros(int(lens[some].sum()), np.int64)
            query = torch.randn(len(unwritten), heads, WIDE_HEAD).to(dtype)
            metadata = plain.plan(batch, table, unwritten)
            wanted = plain.attend(query.float(), keys.float(), values.float(), metadata, 0)
            sent = query.to(machine.device), keys.to(machine.device), values.to(machine.device)
            found = wide.attend(*sent, wide.plan(batch, table, unwritten), 0)
            far.append(rows_apart(found, wanted))
        place = torch.zeros(1, dtype=torch.int32, device=machine.device)
        last = torch.from_numpy(table[4:]).to(machine.device)  # that of the decode alone
        static, graph = wide.plan_static(StaticDecodes(place, last, place)), npu.NPUGraph()
        with captured(graph):
            replayed = wide.attend(*sent, static, 0)
        wide.replay(graph, [static], [64])
        far.append(rows_apart(replayed, wanted))
    return max(far) <= NEAR, f"{max(far):.2g} from float32"


def tiles_weights(machine: Npu) -> Found:
    """Ask whether a tiled weight is right, also in graphs, and faster than rows at few and many rows of x."""
    import torch_npu

    npu, dtype = torch_npu.npu, TORCH_DTYPES[machine.product.dtypes[0]]
    weight = torch.randn(SIDE, SIDE).to(dtype).to(machine.device) / math.sqrt(SIDE)
    tiles = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    times = []
    for rows in ROWS:
        x = torch.randn(rows, SIDE).to(dtype).to(machine.device)
        wanted, graph = F.linear(x, weight), npu.NPUGraph()
        with captured(graph):
            found = F.linear(x, tiles)
        graph.replay()
        if (far := rows_apart(found, wanted)) > NEAR:
            return False, f"{far:.2g} from the product of rows"
        times.append(
            (time_us(machine, partial(F.linear, x, tiles)), time_us(machine, partial(F.linear, x, weight)))
        )
    said = ", ".join(f"{nz:.0f} us against {nd:.0f}" for nz, nd in times)
    if machine.asked.virtual:  # a stand-in's times mean nothing
        return machine.product.tiles_weights, "right, and as it was: a stand-in has no times"
    return all(nz <= nd for nz, nd in times), said


def slices_tiles(machine: Npu) -> Found:
    """Ask whether slices of a tiled cache can be zeroed and copied, on the device and by way of the host."""
    import torch_npu

    numbers = torch.arange(1, 7).half()[:, None, None, None].expand(6, 8, PAGE, 16)
    cache = torch_npu.empty_with_format(
        numbers.shape, dtype=torch.float16, device=machine.device, acl_format=FRACTAL_NZ
    )
    cache.copy_(numbers)
    host = torch.empty(2, 8, PAGE, 16, dtype=torch.float16, pin_memory=True)
    cache[:1].zero_()
    cache[1:3].copy_(cache[3:5])
    host.copy_(cache[4:6], non_blocking=True)
    torch_npu.npu.synchronize()
    cache[3:5].copy_(host, non_blocking=True)
    found, wanted = cache.cpu(), torch.tensor([0, 4, 5, 5, 6, 6]).half()
    is_right = torch.equal(found, wanted[:, None, None, None].expand_as(found))
    return is_right, f"pages are {found[:, 0, 0, 0].tolist()}"


def exact_angles(machine: Npu) -> Found:
    """Ask whether cosines and sines in float32 are exact at positions up to MOST_POSITION, in radians."""
    angles = torch.arange(0, MOST_POSITION, 7).float()
    there = angles.to(machine.device)
    far = max(
        furthest((on_device.cpu().double() - exact).abs())
        for on_device, exact in ((there.cos(), angles.double().cos()), (there.sin(), angles.double().sin()))
    )
    return far <= NEAR_ANGLE, f"{far:.2g} from float64"


def captures_draws(machine: Npu) -> Found:
    """Ask whether a graph draws, by top-k and top-p, the tokens that the same calls draw outside of it."""
    from models.ops.npu.ops import NpuOps

    npu, generator = torch.get_device_module("npu"), torch.Generator().manual_seed(5)
    sampler = Sampler((), VOCABULARY, NpuOps(replace(machine.product, captures_draws=True)))
    slots = SlotPool(len(DRAWN), 2, 1)
    rows = np.arange(len(DRAWN))
    slots.temperature[:], slots.top_k[:], slots.top_p[:] = zip(*DRAWN)
    columns = sampler.draw_columns(rows, np.ones_like(rows), slots)
    assert columns is not None, "some of them are drawn by top-k and top-p"
    sent = torch.from_numpy(columns).to(machine.device)
    logits = torch.randn(len(DRAWN), VOCABULARY, generator=generator).to(
        TORCH_DTYPES[machine.product.dtypes[0]]
    )
    given, graph = logits.to(machine.device), npu.NPUGraph()
    best = sampler.best(given)
    wanted = sampler.draw(given, best, sent).tolist()
    with captured(graph):
        found = sampler.draw(given, best, sent)
    graph.replay()
    return found.tolist() == wanted, f"{found.tolist()} in a graph, {wanted} outside"


def prefetches(machine: Npu) -> Found:
    """Ask whether prefetching a product's weight during attention makes decoding faster.

    Attention of decodes and a product alternate over more weights than the L2 cache holds; in a graph the
    product has to stay right.
    """
    from models.ops.npu.ops import NpuOps, prefetch

    npu = torch.get_device_module("npu")
    dtype, side = TORCH_DTYPES[machine.product.dtypes[0]], npu.Stream()
    ops = NpuOps(replace(machine.product, prefetches=True))
    count = 1 if machine.asked.virtual else WEIGHTS
    drawn = (torch.randn(SIDE, SIDE).to(dtype).to(machine.device) for _ in range(count))
    weights = [ops.pack(each, None)[0] for each in drawn]
    attend, _ = _attention(machine, dtype, [(1, 2000)] * 16, 2)
    x, graph = torch.randn(16, SIDE).to(dtype).to(machine.device), npu.NPUGraph()

    def step(fetches: bool) -> None:
        for weight in weights:
            if fetches:
                prefetch(weight, x, side)
            attend()
            if fetches:
                npu.current_stream().wait_stream(side)
            F.linear(x, weight)

    wanted = F.linear(x, weights[0])
    with captured(graph):
        ops.prefetch((weights[0], None), x)
        ops.await_prefetch()
        found = F.linear(x, weights[0])
    graph.replay()
    if not torch.equal(found, wanted):
        return False, "a product after a prefetch is another in a graph"
    plain_us, fetched_us = (time_us(machine, partial(step, fetches)) for fetches in (False, True))
    if machine.asked.virtual:  # a stand-in's times mean nothing
        return machine.product.prefetches, "right, and as it was: a stand-in has no times"
    return fetched_us < plain_us, f"{fetched_us:.0f} us against {plain_us:.0f} us"


def overlaps_experts(machine: Npu) -> Found:
    """Ask whether captured steps are faster if an expert that all tokens have is computed beside others."""
    from models.ops.npu.ops import NpuOps

    npu, dtype = torch.get_device_module("npu"), TORCH_DTYPES[machine.product.dtypes[0]]
    x = torch.randn(16, SIDE).to(dtype).to(machine.device)
    inner = 64 if machine.asked.virtual else EXPERT
    sizes = (2 * inner, SIDE), (SIDE, inner)
    pack = NpuOps(machine.product).pack
    shared, others = (
        [
            pack(torch.randn(*each).to(dtype).to(machine.device) / math.sqrt(each[1]), None)[0]
            for each in sizes
        ]
        for _ in range(2)
    )
    found, times = [], []
    for overlaps in (False, True):
        ops, graph = NpuOps(replace(machine.product, overlaps_experts=overlaps)), npu.NPUGraph()
        with captured(graph):
            begun = ops.begin_beside(partial(_expert, ops, x, *shared))
            made = _expert(ops, x, *others) + begun()
        graph.replay()
        found.append(made.clone())
        times.append(time_us(machine, graph.replay))
    if not torch.equal(*found):
        return False, "what is computed beside other work is another in a graph"
    if machine.asked.virtual:  # a stand-in's times mean nothing
        return machine.product.overlaps_experts, "right, and as it was: a stand-in has no times"
    return times[1] < times[0], f"{times[1]:.0f} us against {times[0]:.0f} us"


def _expert(ops: Ops, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(ops.swiglu(F.linear(x, gate_up)), down)


def has_mixtures(product: AscendProduct) -> bool:
    """Return whether the product's operators compute mixtures of experts."""
    return product.has_mixtures


def fused(product: AscendProduct) -> bool:
    """Return whether the product has fused attention."""
    return product.is_fused


QUESTIONS = (
    Probe("keeps_nan", "is the maximum of a row with a NaN NaN?", lambda _: True, keeps_nan),
    Probe("packs_float16", "is packed attention right in float16?", fused, packs_float16),
    Probe(
        "reads_wide_heads",
        "is attention by heads of 256 right for single queries, also in a graph, and for longer spans?",
        lambda product: product.name in ("910B", "910C"),
        reads_wide_heads,
    ),
    Probe(
        "tiles_weights",
        "are 16-bit weights in FRACTAL_NZ right and faster?",
        lambda product: product.is_fused or product.is_atb,
        tiles_weights,
    ),
    Probe("slices_tiles", "are slices of tiles views?", lambda product: product.is_atb, slices_tiles),
    Probe(
        "captures_draws",
        "do graphs draw tokens by top-k and top-p as calls outside of them do?",
        lambda product: product.is_fused and product.most_graphs is None,
        captures_draws,
    ),
    Probe(
        "prefetches",
        "is decoding faster where the output product's weight is fetched while attention runs?",
        lambda product: product.name in ("910B", "910C"),
        prefetches,
    ),
    Probe(
        "overlaps_experts",
        "is a shared expert on a second stream right in a graph, and faster?",
        has_mixtures,
        overlaps_experts,
    ),
    Probe("exact_angles", "are cosines of large angles exact?", lambda _: True, exact_angles),
)


@dataclass(frozen=True, slots=True)
class Band:
    """A sliding window: the keys that a query reads, its own among them, and the operator's pre_tokens."""

    window: int
    pre_tokens: int


def attention_apart(
    machine: Npu, dtype: torch.dtype, lens: list[tuple[int, int]], kv_heads: int, band: Band | None = None
) -> float:
    """Return how far one call over (queries, keys) of each span is from plain torch in float32."""
    call, wanted = _attention(machine, dtype, lens, kv_heads, band)
    return rows_apart(call(), wanted)


def _attention(
    machine: Npu, dtype: torch.dtype, lens: list[tuple[int, int]], kv_heads: int, band: Band | None = None
) -> tuple[Callable[[], Tensor], Tensor]:
    """Return a causal call over pages, and the result of plain torch in float32."""
    import torch_npu

    generator = torch.Generator().manual_seed(kv_heads)
    counts = [-(-keys // PAGE) for _, keys in lens]
    cache = torch.randn(2, 1 + sum(counts), PAGE, kv_heads * DIM, generator=generator).to(dtype)
    query = torch.randn(sum(queries for queries, _ in lens), HEADS, DIM, generator=generator).to(dtype)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    wanted, row, page = [], 0, 1
    for span, (queries, keys) in enumerate(lens):
        pages = slice(page, page + counts[span])
        table[span, : counts[span]] = torch.arange(pages.start, pages.stop)
        k, v = (
            each[pages].flatten(0, 1)[:keys].view(keys, kv_heads, DIM).transpose(0, 1).float()
            for each in cache
        )
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        seen = seen if band is None else seen.triu(keys - queries - band.window + 1)
        q = query[row : row + queries].transpose(0, 1).float()
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, enable_gqa=True)[0]
        wanted.append(out.transpose(0, 1))
        row, page = row + queries, pages.stop
    ends = torch.tensor([queries for queries, _ in lens]).cumsum(0).tolist()
    arguments = {
        "query": query.to(machine.device),
        "key": cache[0].to(machine.device),
        "value": cache[1].to(machine.device),
        "atten_mask": torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).triu(1).to(machine.device),
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": [keys for _, keys in lens],
        "block_table": table.to(machine.device),
        "num_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "scale": DIM**-0.5,
        "input_layout": "TND",
        "block_size": PAGE,
        "sparse_mode": 3,
    }
    if band is not None:
        arguments |= {"sparse_mode": 4, "pre_tokens": band.pre_tokens, "next_tokens": 0}

    def call() -> Tensor:
        found: Tensor = torch_npu.npu_fused_infer_attention_score(**arguments)[0]
        return found

    return call, torch.cat(wanted)


def time_us(machine: Npu, call: Callable[[], object]) -> float:
    """Return the microseconds of one of CALLS consecutive calls; a stand-in makes a single call."""
    num_calls = 1 if machine.asked.virtual else CALLS
    npu = torch.get_device_module("npu")
    call()
    npu.synchronize()
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    npu.synchronize()
    return (time.perf_counter() - start_s) / num_calls * 1e6
