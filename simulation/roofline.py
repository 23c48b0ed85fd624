"""Model the time of a step by what it multiplies, reads, sends and launches (`models.cost` counts these).

Each product takes the longer of its multiplications, in whole tiles, and of reading its weights, or the sum
of both on a device that does not read ahead; attention takes the same of its scores and of the keys and
values that it reads; the operators between them read and write the activations. Operators run one after the
other: only the host's launches overlap with the device's work.

Rates, host times and links can be fitted to measurements: to the steps of one device and to messages between
several. The model then predicts steps that several devices share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from devices.rates import DeviceRates
from kv_cache.pages import Index
from models.config import DecoderConfig
from models.cost import Counts, ModelPart, StepProduct
from simulation.fitted import non_negative

MOST_JOINED = 16  # tokens of a span that visit all devices which divide the cache (attention/divided.py)
MOST_SIZES = 2**16  # step sizes whose times are kept


@dataclass(frozen=True, slots=True)
class _Size:
    """The parts of a step's time that depend on its numbers of tokens, spans and samples alone."""

    share: float  # share of the model's layers
    products_s: float
    activations_s: float
    all_reduce_s: float
    kernels_s: float
    is_graph: bool
    launch_s: float


@dataclass(slots=True)
class Roofline:
    """A cost model for `tensor` devices that share each layer; with `stage` None they hold the whole model.

    Steps of decodes alone run as captured graphs up to `graphs` rows, others operator by operator. With
    `hides_host` the host does its work between steps while the device computes.
    """

    config: DecoderConfig
    device: DeviceRates
    tensor: int = 1
    graphs: int = 0
    hides_host: bool = False
    stage: ModelPart | None = None
    contexts: int = 1  # devices that divide each page of the cache
    least_divided: int = 0  # tokens of a step from which its rows are divided, see `Counts`
    _sizes: dict[tuple[int, int, int], _Size] = field(default_factory=dict)
    # Window, and the number of layers that have it
    _windows: list[tuple[int | None, int]] = field(init=False)
    # Most tokens that a query of sparse attention reads, and the number of layers that have it
    _sparse: tuple[int, int] = (0, 0)
    _counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self._counts = Counts(self.config, self.tensor, self.stage, self.contexts, self.least_divided)
        layers = [each for each in self.config.layers if each.mixer != "recurrent"]
        self._windows = list(Counter(each.window for each in layers if each.index is None).items())
        if (latent := self.config.latent) is not None and latent.index is not None:
            self._sparse = latent.index.top_k, sum(each.index is not None for each in layers)

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of the whole step, including the pages that are copied before it."""
        num_tokens = batch.num_tokens
        if self.contexts > 1:
            return self._divided_s(batch, slots)
        seen = self.seen(batch, num_tokens)
        captured = batch.num_spans + batch.num_drafts  # number of tokens of a step without prompts
        index_s = self._index_s(batch) if self.config.num_indexers else 0.0
        taken_s = self.time_s(num_tokens, captured, len(batch.owners), *seen, index_s=index_s)
        return taken_s + self._copies_s(batch, slots) if batch.copies else taken_s

    def _divided_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of a step whose devices divide the cache.

        Each reads its part of what short spans see, and all of what is gathered for longer ones.
        """
        lens = batch.stops - batch.starts
        is_long = lens > MOST_JOINED
        _, pairs = self.seen(batch, batch.num_tokens)
        gathered = float(self.config.num_layers * batch.stops[is_long].sum())
        joined_rows = float(lens[~is_long].sum())
        # Rows of one request read its keys once each
        joined = float(self.config.num_layers * (batch.stops * lens)[~is_long].sum()) / self.contexts
        captured = batch.num_spans + batch.num_drafts
        sizes = batch.num_tokens, captured, len(batch.owners)
        taken_s = self.time_s(*sizes, gathered + joined, pairs)
        taken_s += self._counts.contexts_s(self.device, joined_rows, gathered)
        return taken_s + self._copies_s(batch, slots) if batch.copies else taken_s

    def seen(self, batch: Batch, num_tokens: int) -> tuple[float, float]:
        """Return the tokens whose keys are read and the scored pairs, summed over all layers."""
        starts, stops = batch.starts, batch.stops
        total = int(stops.sum())
        if self._windows == [(None, self.config.num_layers)] and num_tokens == batch.num_spans:
            return float(self.config.num_layers * total), float(self.config.num_layers * total)
        lens = stops - starts
        context = pairs = 0.0
        top, sparse = self._sparse
        if sparse:
            positions = self._near(starts, stops, top)
            is_dense = stops <= top
            # Each query of a span that sees more gathers what it reads, on one device where they divide rows
            ways = self.tensor if self._counts.divides_choice(num_tokens) else 1
            context += sparse * float(np.where(is_dense, stops, positions / ways).sum())
            pairs += sparse * float(positions.sum())
        for window, count in self._windows:
            if window is None:
                context += count * float(total)
                pairs += count * float((lens * (starts + stops + 1)).sum()) / 2
            else:
                near = np.minimum(stops, window + lens)
                context += count * float(near.sum())
                pairs += count * float(self._near(starts, stops, window).sum())
        return context, pairs

    @staticmethod
    def _near(starts: Index, stops: Index, most: int) -> NDArray[np.float64]:
        """Return the scores of each span whose queries read the tokens before them, at most so many."""
        # Positions that have fewer tokens before them
        first, last = np.minimum(starts, most), np.minimum(stops, most)
        growing = (last * (last + 1) - first * (first + 1)) / 2
        near: NDArray[np.float64] = growing + most * (stops - starts - (last - first))
        return near

    def _index_s(self, batch: Batch) -> float:
        """Return the seconds of the indexers, which score all tokens where some are not read.

        Where the devices divide the rows of a step, layers exchange queries and results.
        """
        chooses = batch.stops > self._sparse[0]
        starts, stops = batch.starts[chooses], batch.stops[chooses]
        pairs = float(((stops - starts) * (starts + stops + 1)).sum()) / 2
        count = self.config.num_indexers
        num_tokens = float((batch.stops - batch.starts).sum())
        operations, moved = self._counts.indexers(num_tokens, count * float(stops.sum()), count * pairs)
        taken_s = self.device.operator_s(operations, self.config.dtype, moved)
        if len(stops) and self._counts.divides_choice(num_tokens):
            exchanged = self._counts.exchanged_bytes(num_tokens)
            taken_s += self._sparse[1] * self.device.exchange_s(exchanged, self.tensor)
        return self._counts.share * taken_s

    def time_s(
        self,
        num_tokens: int,
        captured: int,
        num_sampled: int,
        context: float,
        pairs: float,
        *,
        index_s: float = 0.0,
    ) -> float:
        """Return the seconds of a step of these sizes, which is a graph if all tokens are `captured` ones.

        `context` and `pairs` are as `seen` returns them, and the indexers take `index_s`.
        """
        key = num_tokens, captured, num_sampled
        size = self._sizes.get(key)
        if size is None:
            size = self._size(*key)
            if len(self._sizes) < MOST_SIZES:
                self._sizes[key] = size
        busy_s = size.products_s + size.share * self._attention_s(num_tokens, context, pairs)
        busy_s += size.activations_s + index_s
        busy_s += size.all_reduce_s
        busy_s += size.kernels_s
        host_s = 0.0 if self.hides_host else 1e-6 * (self.device.host_us + self.device.row_us * num_sampled)
        return host_s + (busy_s + size.launch_s if size.is_graph else max(busy_s, size.launch_s))

    def _copies_s(self, batch: Batch, slots: SlotPool) -> float:
        """Return the seconds of page copies: each byte is read and written.

        Copies to the host count the same.
        """
        token_bytes = self.config.kv_bytes_by_group(self.tensor)
        num_bytes = sum(len(each.sources) * token_bytes[each.group] for each in batch.copies)
        share = self._counts.share / self.contexts
        return 2 * num_bytes * slots.page_size * share / self.device.bytes_per_s

    def _size(self, num_tokens: int, captured: int, num_sampled: int) -> _Size:
        counts, device = self._counts, self.device
        is_graph = num_tokens == captured <= self.graphs
        divides = counts.divides(num_tokens, is_graph=is_graph)
        operators = counts.launches(divides=divides)
        moved = counts.activation_bytes(num_tokens, divides=divides) + counts.state_bytes(num_sampled)
        return _Size(
            share=counts.share,
            products_s=sum(
                each.times * self._product_s(each) for each in counts.products(num_tokens, num_sampled)
            ),
            activations_s=moved / device.bytes_per_s,
            all_reduce_s=counts.sums_s(device, num_tokens, divides=divides),
            kernels_s=operators * device.kernel_us * 1e-6,
            is_graph=is_graph,
            launch_s=(device.graph_us if is_graph else operators * device.launch_us) * 1e-6,
        )

    def _product_s(self, product: StepProduct) -> float:
        """Return the seconds of one product, whose multiplications come in whole tiles."""
        height, width = self.device.tile
        rows, outputs = (-(-product.rows // height) * height, -(-product.outputs // width) * width)
        operations = 2 * rows * product.inputs * outputs
        return self.device.operator_s(operations, product.dtype, product.num_bytes)

    def _attention_s(self, num_tokens: int, context: float, pairs: float) -> float:
        operations, moved = self._counts.attention(num_tokens, context, pairs)
        return self.device.operator_s(operations, self.config.dtype, moved)


# Factors by which rates are changed in turn, in falling order
FACTORS = (4.0, 2.0, 1.4, 1.2, 1.1, 1.05, 1.02)
MOST_TURNS = 50  # most turns with one factor
Rates = tuple[float, float, float]  # TFLOP/s, and the host's microseconds for a step and for a row


@dataclass(frozen=True, slots=True)
class StepSize:
    """The arguments of `Roofline.time_s` for one step, whatever the number of devices."""

    num_tokens: int
    captured: int
    num_sampled: int
    context: float
    pairs: float


def predicted_s(roofline: Roofline, size: StepSize) -> float:
    """Return the predicted seconds of a step of this size."""
    return roofline.time_s(size.num_tokens, size.captured, size.num_sampled, size.context, size.pairs)


def fitted_device(
    device: DeviceRates,
    config: DecoderConfig,
    steps: Sequence[tuple[StepSize, float]],
    memory_gb_per_s: float,
) -> DeviceRates:
    """Return the device whose product rate and host times come nearest to measured steps of one device.

    The mean of |log(predicted / measured)| is minimised, so that stalls count little. The memory rate is
    measured separately: steps of few rows all read the same weights, which cannot be told from host time, and
    devices that share a step do not share that time. Operators take no time of their own, because on a CPU
    the host is the device. In each turn all three rates are tried one factor away from the best, and the
    factors fall.
    """
    device = replace(
        device,
        launch_us=0.0,
        kernel_us=0.0,
        graph_us=0.0,
        memory_gb_per_s=memory_gb_per_s,
        matrix_efficiency=1.0,
        memory_efficiency=1.0,
    )
    dtype = config.dtype
    taken_s = np.log([seconds for _, seconds in steps])

    def of(rates: Rates) -> DeviceRates:
        tflop, host_us, row_us = rates
        return replace(
            device, tflop_per_s=device.tflop_per_s | {dtype: tflop}, host_us=host_us, row_us=row_us
        )

    sampled = np.array([size.num_sampled for size, _ in steps])

    @cache
    def computed_s(tflop: float) -> NDArray[np.float64]:
        """Return the seconds of each step but for the host's, which are the cheap part of a prediction."""
        roofline = Roofline(config, of((tflop, 0.0, 0.0)))
        return np.array([predicted_s(roofline, size) for size, _ in steps])

    def error(rates: Rates) -> float:
        tflop, host_us, row_us = rates
        said = np.log(computed_s(tflop) + 1e-6 * (host_us + row_us * sampled))
        return float(np.abs(said - taken_s).mean())

    best = (0.1, 500.0, 100.0)  # the order of magnitude of one core
    least = error(best)
    for factor in FACTORS:
        for _ in range(MOST_TURNS):
            tried = [
                (best[0] * one, best[1] * other, best[2] * third)
                for one, other, third in product((factor, 1.0, 1 / factor), repeat=3)
            ]
            errors = [error(each) for each in tried]
            if min(errors) >= least:
                break
            least = min(errors)
            best = tried[errors.index(least)]
    return of(best)


def with_links(device: DeviceRates, num_devices: int, sums: Sequence[tuple[int, float]]) -> DeviceRates:
    """Return the device with links fitted to the seconds of sums over `num_devices` devices.

    The fit is a least squares of relative errors (see `DeviceRates.all_reduce_s`).
    """
    hops = 2 * (num_devices - 1).bit_length()
    moved = [2 * (num_devices - 1) / num_devices * num_bytes for num_bytes, _ in sums]
    taken_s = np.array([seconds for _, seconds in sums])
    left = np.array([[hops, each] for each in moved]) / taken_s[:, None]
    hop_s, byte_s = non_negative(left, np.ones(len(sums)))
    return replace(device, link_us=1e6 * hop_s, link_gb_per_s=1e-9 / max(byte_s, 1e-15), link_efficiency=1.0)
