"""Model the time of a step by what it multiplies, reads, sends and launches (`models.cost` counts these).

Each product takes the longer of its multiplications, in whole tiles, and of reading its weights, or the sum
of both on a device that does not read ahead; attention takes the same of its scores and of the keys and
values that it reads; the operators between them read and write the activations. Operators run one after the
other: only the host's launches overlap with the device's work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from devices.rates import DeviceRates
from kv_cache.pages import Index
from models.config import DecoderConfig
from models.cost import Counts, ModelPart, StepProduct

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

        Copies to the host count the same. A page of the last group is a request's recurrent states, which
        devices that divide pages of tokens do not divide any further.
        """
        token_bytes = self.config.kv_bytes_by_group(self.tensor)
        num_bytes = num_states = 0
        for each in batch.copies:
            if each.group < len(token_bytes):
                num_bytes += len(each.sources) * token_bytes[each.group]
            else:
                num_states += len(each.sources)
        moved = 2 * num_bytes * slots.page_size * self._counts.share / self.contexts
        return (moved + self._counts.state_bytes(num_states)) / self.device.bytes_per_s

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
