"""Define how a machine's memory is divided for a recipe, and report the division in words.

sizing.py computes the numbers of a plan, and memory_errors.py explains why one does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv_cache.tier.page_tier import MOST_QUEUED_BYTES
from kv_cache.tier.store import HEAD_BYTES
from models.config import DecoderConfig, HeadConfig, needs_long_factors
from models.parallel.share import Share
from recipes.assembly.families import draft_config
from recipes.schema.recipe import Recipe
from recipes.schema.tier_section import tier_of

GIB = 2**30
WHOLE = Share()  # a single rank, which holds everything


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of the layers that see a window of one size (see kv_cache/groups.py)."""

    window: int  # positions that a query sees
    page_bytes: int  # bytes of one page, over these layers
    most_of_a_request: int  # pages that a request holds at most while it decodes
    num_pages: int = 0  # allocated pages, including the null page
    num_host_pages: int = 0  # pages in the host tier, including the null page; 0: no host tier

    def held(self, num_tokens: int, page_size: int) -> int:
        """Return the pages that a request of so many cached tokens holds at most while it decodes."""
        return min(-(-num_tokens // page_size), self.most_of_a_request)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a recipe needs of the machine's memory, and what that leaves for a request.

    What has a default is filled in as the plan is made.
    """

    num_parameters: int
    weight_bytes: int
    adapter_bytes: int  # bytes of the places for adapters
    page_bytes: int  # bytes of one page: keys and values of all layers but those of `windows`
    windows: tuple[WindowPages, ...]
    num_pages: int = 0  # allocated pages, including the null page
    num_pages_fitting: int = 0  # pages that would fit beside everything else
    num_host_pages: int  # pages of the host tier, including the null page; 0: no host tier
    host_because: str = ""  # what bounds the host tier below `cache.host_gib`; empty: nothing
    host_is_device: bool  # the host tier lies in the device's memory, as on a CPU
    cache_tokens: int = 0  # the longest request that the cache alone would allow
    longest_tokens: int  # a request's prompt and answer
    longest_because: str = ""  # the reason for this limit
    slot_bytes: int
    state_bytes: int  # bytes of the recurrent states of one request, over all layers that have one
    num_slot_states: int  # states of running requests: one for each slot, and the null state; 0: none has one
    num_kept_states: int  # states from which later requests go on
    num_host_states: int  # states in the host tier, including the null one; 0: no host tier
    activation_bytes: int  # bytes of activations in the largest step
    is_measured: bool  # the largest step has been run; otherwise its bytes are estimated
    reserve_bytes: int
    memory_bytes: int
    ranks_here: int = 1  # ranks of this machine, which share its host's memory

    @property
    def num_states(self) -> int:
        """The allocated states."""
        return self.num_slot_states + self.num_kept_states

    @property
    def slot_state_bytes(self) -> int:
        """Bytes of the states of running requests, and of the null state."""
        return self.num_slot_states * self.state_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of states from which later requests go on."""
        return self.num_kept_states * self.state_bytes

    @property
    def further_pools(self) -> list[int]:
        """The number of pages of each window, followed by that of states, if there are any."""
        return [*(each.num_pages for each in self.windows), *([self.num_states] if self.num_states else [])]

    @property
    def further_page_bytes(self) -> tuple[int, ...]:
        """The bytes of a page of each of these."""
        states = (self.state_bytes,) if self.num_states else ()
        return (*(each.page_bytes for each in self.windows), *states)

    @property
    def window_pools(self) -> tuple[tuple[int, int, int], ...]:
        """For each window its size, its pages, and its pages in the host tier."""
        return tuple((each.window, each.num_pages, each.num_host_pages) for each in self.windows)

    @property
    def window_bytes(self) -> int:
        """Bytes of the pages of windows."""
        return sum(each.num_pages * each.page_bytes for each in self.windows)

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.window_bytes + self.kept_bytes

    @property
    def host_bytes(self) -> int:
        of_windows = sum(each.num_host_pages * each.page_bytes for each in self.windows)
        return self.num_host_pages * self.page_bytes + of_windows + self.num_host_states * self.state_bytes

    @property
    def host_beside_bytes(self) -> int:
        """The bytes of the host tier in the device's memory."""
        return self.host_bytes if self.host_is_device else 0

    @property
    def beside_bytes(self) -> int:
        """Everything on the device except the pages of the cache."""
        parts = (self.slot_bytes, self.activation_bytes, self.reserve_bytes, self.host_beside_bytes)
        return self.weight_bytes + self.adapter_bytes + self.slot_state_bytes + sum(parts)

    @property
    def total_bytes(self) -> int:
        return self.beside_bytes + self.cache_bytes


def least_cache_bytes(recipe: Recipe, sizing: MemoryPlan) -> int:
    """Return the bytes of 2 pages, with the states and the pages of windows that the smallest cache has."""
    cache, num_window_pages = recipe.cache, recipe.cache.num_window_pages or 2
    follows = cache.num_pages is None and cache.num_states is None  # kept states follow from the memory
    of_windows = num_window_pages * sum(each.page_bytes for each in sizing.windows)
    return 2 * sizing.page_bytes + of_windows + (0 if follows else sizing.kept_bytes)


def _int8_pages(config: DecoderConfig) -> str:
    if not config.int8_cache:
        return ""
    return ", int8 and scales" if config.scales_in_pages else ", int8; scales are the checkpoint's"


def report(
    recipe: Recipe, config: DecoderConfig, sizing: MemoryPlan, share: Share = WHOLE
) -> list[tuple[str, str]]:
    """Return the plan of the rank with this share as a table, in words."""
    page_size, num_slots = recipe.cache.page_size, recipe.scheduler.num_slots
    pages_each = -(-(sizing.longest_tokens - 1) // page_size)
    wanted = num_slots * pages_each
    how = "measured" if sizing.is_measured else "estimated"
    memory = in_gib(sizing.memory_bytes)
    draft = draft_config(recipe, config) if share.is_last else None
    kept = [layer for layer in share.layers(config) if config.layers[layer].mixer != "recurrent"]
    num_layers, beside = sum(config.group_of(layer) == 0 for layer in kept), []
    if draft is not None:
        num_layers += draft.num_layers
        beside = [("head" if isinstance(draft, HeadConfig) else "draft model", _model(draft))]
    ranks = recipe.parallel.ranks
    of_a_rank = (
        [("ranks", f"{ranks}; what follows is of each, with a device of its own")] if ranks > 1 else []
    )
    return [
        ("model", _model(config)),
        *_mixture(config),
        *of_a_rank,
        *_stages(config, share),
        *_spread(config, share),
        *beside,
        ("weights", in_gib(sizing.weight_bytes)),
        *_adapters(recipe, sizing),
        (
            "a page",
            f"{page_size} tokens, {sizing.page_bytes / 1024:,.1f} KiB over {num_layers} layers"
            + _int8_pages(config),
        ),
        ("pages", f"{sizing.num_pages:,}; {sizing.num_pages_fitting:,} would fit into {memory}"),
        *_windows(config, sizing, share),
        *_states(config, sizing, share),
        ("cache", f"{in_gib(sizing.cache_bytes)}, {sizing.cache_tokens - 1:,} tokens"),
        ("host tier", host_tier(sizing)),
        *_tier(recipe, sizing),
        ("slot table", in_gib(sizing.slot_bytes)),
        ("activations", f"{in_gib(sizing.activation_bytes)} in the largest step, {how}"),
        ("reserve", in_gib(sizing.reserve_bytes)),
        ("sum", f"{in_gib(sizing.total_bytes)} of {memory}"),
        ("longest request", f"{sizing.longest_tokens:,} tokens ({sizing.longest_because})"),
        *_longest(sizing, page_size, pages_each),
        *_rotary(config, sizing.longest_tokens),
        (
            "all slots at longest",
            f"{num_slots} x {pages_each:,} pages; the cache holds {(sizing.num_pages - 1) / wanted:.0%}",
        ),
    ]


def _windows(config: DecoderConfig, sizing: MemoryPlan, share: Share) -> list[tuple[str, str]]:
    """Return a row for each group of layers with a window."""
    rows = []
    for number, each in enumerate(sizing.windows, 1):
        num_layers = sum(config.group_of(layer) == number for layer in share.layers(config))
        page = f"{each.page_bytes / 1024:,.1f} KiB a page over {num_layers} layers"
        rows.append((f"window of {each.window:,}", f"{each.num_pages:,} pages, {page}"))
    return rows


def _states(config: DecoderConfig, sizing: MemoryPlan, share: Share) -> list[tuple[str, str]]:
    """Return a row on the recurrent states, if the model has any."""
    if not sizing.num_states:
        return []
    num_layers = sum(config.layers[layer].mixer == "recurrent" for layer in share.layers(config))
    all_bytes, one = sizing.num_states * sizing.state_bytes, in_gib(sizing.state_bytes)
    whose = f"{sizing.num_slot_states - 1:,} of slots, {sizing.num_kept_states:,} kept for later requests"
    size = f"{one} each over {num_layers} layers: {in_gib(all_bytes)}"
    return [("states", f"{sizing.num_states:,} ({whose}), {size}")]


def _longest(sizing: MemoryPlan, page_size: int, num_pages: int) -> list[tuple[str, str]]:
    """Return what the longest request holds, and what it would hold if no window gave pages back."""
    if not sizing.windows:
        return []
    held = [(each, each.held(sizing.longest_tokens - 1, page_size)) for each in sizing.windows]
    pages = " and ".join(
        [f"{num_pages:,} pages", *(f"{count:,} of window {e.window:,}" for e, count in held)]
    )
    num_bytes = num_pages * sizing.page_bytes + sum(count * each.page_bytes for each, count in held)
    without = num_pages * (sizing.page_bytes + sum(each.page_bytes for each in sizing.windows))
    return [("its pages", f"{pages}: {in_gib(num_bytes)}; {in_gib(without)} if windows gave none back")]


def _tier(recipe: Recipe, sizing: MemoryPlan) -> list[tuple[str, str]]:
    """Return the row on the tier below the host tier, and on the host memory that its writes take."""
    asked = tier_of(recipe.cache.tier)
    if asked is None:
        return []
    num_bytes, place = int(asked.gib * GIB), asked.path or asked.url
    sizes = [sizing.page_bytes, *(each.page_bytes for each in sizing.windows)]
    pages = f"{num_bytes // sum(HEAD_BYTES + size for size in sizes):,} pages"
    if sizing.num_states:
        pages += f", or {num_bytes // (HEAD_BYTES + sizing.state_bytes):,} states"
    on_the_way = f"up to {in_gib(MOST_QUEUED_BYTES)} of the host's memory on their way"
    return [("tier below", f"{asked.kind} {place}, {in_gib(num_bytes)}, {pages}; {on_the_way}")]


def _adapters(recipe: Recipe, sizing: MemoryPlan) -> list[tuple[str, str]]:
    asked = recipe.adapters
    if not asked.most:
        return []
    return [("adapters", f"{in_gib(sizing.adapter_bytes)}, room for {asked.most} of rank {asked.rank}")]


def _stages(config: DecoderConfig, share: Share) -> list[tuple[str, str]]:
    if share.stages == 1:
        return []
    shares = [replace(share, stage=stage) for stage in range(share.stages)]
    counts = " and ".join(str(len(each.layers(config))) for each in shares)
    return [("stages", f"{share.stages}, of {counts} layers; what follows is of number {share.stage + 1}")]


def _spread(config: DecoderConfig, share: Share) -> list[tuple[str, str]]:
    """Return which experts are on which ranks, if experts are spread."""
    mixture, (_, sharing) = config.mixture, share.of_an_expert
    if mixture is None or share.experts == 1:
        return []
    held = share.part(config)
    assert held.mixture is not None, "a part of a mixture is one"
    parts = [replace(share, tensor=part * sharing) for part in range(share.experts)]
    whose = ", ".join(
        f"{_from_to(each.places(mixture))} on {_from_to(range(each.tensor, each.tensor + sharing))}"
        for each in parts
    )
    size = in_gib(held.bytes_of_experts(held.mixture.num_held))
    divided = "" if sharing == 1 else f", divided by {sharing} ranks"
    if mixture.placement:
        whose = "as parallel.placement says"
    return [("spread", f"{held.mixture.num_held} whole experts of a layer{divided}, {size} a rank: {whose}")]


def _from_to(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _model(config: DecoderConfig) -> str:
    dtype = config.dtype + (f", {config.quantization}" if config.quantization else "")
    dtype += ", W4A16" if config.kept_form else ""
    dtype += f", read from {config.stored_form}" if config.stored_form else ""
    active = f", {config.num_active_parameters / 1e6:,.1f} M of them for a token" if config.mixture else ""
    return f"{config.family}, {config.num_parameters / 1e6:,.1f} M parameters{active}, {dtype}"


def _rotary(config: DecoderConfig, longest_tokens: int) -> list[tuple[str, str]]:
    if config.rope.kind != "longrope":
        return []
    original = config.rope.original_max_positions
    if needs_long_factors(config.rope, longest_tokens):
        said = f"long factors for all requests; short ones with scheduler.max_request_tokens={original + 1}"
    else:
        said = f"short factors, since no request has more than {original:,} tokens to compute"
    return [("rotary embedding", said)]


def _mixture(config: DecoderConfig) -> list[tuple[str, str]]:
    mixture = config.mixture
    if mixture is None:
        return []
    said = f"{mixture.num_experts} in each of {config.num_mixtures} layers, {mixture.num_chosen} for a token"
    return [("experts", f"{said}, which reads {in_gib(config.step_weight_bytes)} of all weights")]


def host_tier(sizing: MemoryPlan) -> str:
    """Return what the host tier takes, and why it is not larger."""
    because = f" ({sizing.host_because})" if sizing.host_because else ""
    return f"{in_gib(sizing.host_bytes)}, {max(0, sizing.num_host_pages - 1):,} pages{because}"


def in_gib(count: int) -> str:
    """Return a number of bytes in GiB or MiB, as people read it."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"
