"""Define what a recipe says: the model, the machine and the numbers to serve it with.

The sections for parallelism, scheduling, speculation, serving, adapters and the page tier have modules of
their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recipes.schema.adapters_section import AdaptersSection, adapter_contradictions
from recipes.schema.checks import (
    answer_contradictions,
    contradictions,
    event_contradictions,
    int8_contradictions,
    page_contradictions,
)
from recipes.schema.keys import key, keys_of
from recipes.schema.parallel_section import (
    ParallelSection,
    context_contradictions,
    placement_contradictions,
)
from recipes.schema.recipe_error import RecipeError
from recipes.schema.scheduler_section import SchedulerSection
from recipes.schema.server_section import ServerSection
from recipes.schema.speculation_section import SpeculationSection, speculation_contradictions
from recipes.schema.tier_section import tier_contradictions

ROOT = Path(__file__).resolve().parents[2]  # the repository, to which a recipe's paths are relative
KINDS_OF = {  # the keys of `device` that only some kinds of machine read
    "threads": ("cpu",),
    "compile": ("cpu",),
    "graphs": ("cuda", "npu"),
    "batch_invariant": ("cpu", "cuda"),
    "product": ("npu",),
    "memory_gib": ("cuda", "npu"),
    "virtual": ("npu",),
    "virtual_fp32": ("npu",),
    "virtual_release": ("npu",),
}


def from_root(path: Path) -> str:
    """Return a path as a recipe would write it: relative to the repository, unless it leads out of it."""
    text = os.path.relpath(path, ROOT)
    return os.fspath(path) if text.startswith("..") else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The decoder, and where its weights come from."""

    path: Path | None = key(
        "directory in the Hugging Face layout: `config.json`, `*.safetensors`, tokenizer", default=None
    )
    config: dict[str, Any] | None = key(
        "the keys of a `config.json`, written here in place of `model.path`", default=None
    )
    config_overrides: dict[str, Any] | None = key(
        "fields of the checkpoint's `config.json` that count with these values in place of its own, such as"
        " `rope_scaling`; a field that changes the shapes of weights is refused",
        default=None,
    )
    weights: Literal["checkpoint", "random"] = key(
        "checkpoint: read from `model.path`; random: seeded random ones of the same shapes",
        default="checkpoint",
    )
    seed: int = key("seed of random weights", default=0, least=0, most=2**63 - 1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "type of weights, activations and cache; auto: as `config.json` says, or where it is silent as the"
        " first tensor has it",
        default="auto",
    )
    quantization: Literal["auto", "w8a8", "w4a16"] = key(
        "w8a8: linear layers in int8, quantized while they are loaded; w4a16: those that a checkpoint packs"
        " in 4 bits stay so; auto: as `config.json` says, with what is packed multiplied out",
        default="auto",
    )
    generation_config: Literal["auto", "none"] = key(
        "auto: temperature, top_k, top_p, min_p and repetition_penalty that a request leaves out are those of"
        " the checkpoint's `generation_config.json`, as is the length of an answer without a bound; none:"
        " those of docs/request_fields.md",
        default="auto",
    )
    kept_in: Path | None = key(
        "cuda, npu: a folder, as in /dev/shm, where each rank keeps its weights for the engine's next start,"
        " in as many bytes as on the device; relative to the repository",
        default=None,
    )
    pooling: Literal["none", "last", "mean"] = key(
        "what the model's embeddings are, if it was trained for them: its last hidden state at the last token"
        " of a text, or the mean over all of them; none: /v1/embeddings is refused",
        default="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSection:
    """The machine that computes."""

    kind: Literal["cpu", "cuda", "npu"] = key("the machine that computes")
    attention: Literal["fused", "reference"] = key(
        "fused: the device's own operators; reference: plain torch, which defines what is right",
        default="fused",
    )
    threads: int | None = key(
        "cpu: threads that compute; null: `OMP_NUM_THREADS`, or one for each core unless a short measurement"
        " at start-up finds one thread faster",
        default=None,
        least=1,
        most=1024,
    )
    compile: Literal["auto", True, False] = key(
        "cpu: compute products, attention and norms by C++ sources that are compiled at the first start;"
        " auto: where there is a C++ compiler",
        default="auto",
    )
    graphs: int = key(
        "cuda, npu: steps of only decodes and their drafts, of up to so many tokens, run as captured graphs;"
        " 0: none",
        default=0,
        least=0,
        most=1024,
    )
    count_experts: bool = key(
        "count how many tokens choose each expert, for `/experts`, `/metrics` and `scripts.place`",
        default=False,
    )
    batch_invariant: bool = key(
        "cpu, cuda: a request's results do not depend on its neighbours, bit for bit; cuda: slower; cpu:"
        " logits depend neither on how a prompt was cut nor on threads, which needs a C++ compiler",
        default=False,
    )
    product: Literal["310P", "910", "910B", "910C", "950"] | None = key(
        "npu: the product whose operators and limits hold; null: the one that the device reports",
        default=None,
    )
    memory_gib: float | None = key(
        "cuda, npu: the free memory of the device that `recipes show` plans with; null: what the device"
        " reports",
        default=None,
        least=0.001,
        most=2**20,
    )
    virtual: bool = key(
        "npu: use a software stand-in on this machine, for trials and tests; slow", default=False
    )
    virtual_fp32: bool = key(
        "npu: for tests: the stand-in's fused operators take float32, which no product does",
        default=False,
    )
    virtual_release: str | None = key(
        "npu: the stand-in takes only the calls that this release of torch_npu takes, such as 2.10.0.post4;"
        " null: those of the installed one",
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSection:
    """The pages of keys and values."""

    page_size: int = key("tokens in a page", default=16, least=1, most=1024)
    dtype: Literal["auto", "int8"] = key(
        "type of keys and values; int8: half the bytes of 16 bits, and a scale for each token and head; cuda:"
        " where `device.attention` is reference; cpu: there too, or where there is a C++ compiler; npu: where"
        " it is fused, with a checkpoint's scales for each channel alone (C8), or sparse attention; auto: as"
        " `model.dtype`",
        default="auto",
    )
    num_pages: int | None = key(
        "pages in the cache; the first one stays empty", default=None, least=2, most=2**31 - 1
    )
    num_window_pages: int | None = key(
        "pages of the layers with a sliding window, which keep only what a query can see; the first one stays"
        " empty; null: two windows for each slot and a step's tokens, within half of the cache's memory",
        default=None,
        least=2,
        most=2**31 - 1,
    )
    num_states: int | None = key(
        "recurrent states of a model that keeps any, one for each slot among them; the others are copies from"
        " which later requests go on; the first one stays empty; null: by `cache.state_fraction`, or two for"
        " each slot where `cache.num_pages` is given",
        default=None,
        least=2,
        most=2**31 - 1,
    )
    state_fraction: float = key(
        "share of the cache's memory for recurrent states that are kept for later requests, beside one for"
        " each slot; read with `cache.memory_gib` and `cache.memory_fraction`",
        default=0.3,
        least=0.0,
        most=0.9,
    )
    state_dtype: Literal["float32", "bfloat16", "float16"] = key(
        "type of recurrent states; with 16 bits tokens are not those of the model in float32",
        default="float32",
    )
    memory_gib: float | None = key(
        "in place of `cache.num_pages`: as many pages as fit into this much memory",
        default=None,
        least=0.001,
        most=2**20,
    )
    memory_fraction: float | None = key(
        "in place of `cache.num_pages`: as many pages as fit into this share of the device's memory, which"
        " also holds weights, activations and reserve; the ranks of a machine divide a CPU's equally",
        default=None,
        least=0.01,
        most=1.0,
    )
    reserve_gib: float = key(
        "device memory left free for the process itself and for others", default=0.5, least=0, most=2**20
    )
    host_gib: float | None = key(
        "host memory for the pages of preempted requests and for evicted shared pages; null or 0: they are"
        " computed again",
        default=None,
        least=0,
        most=2**20,
    )
    host_fraction: float | None = key(
        "take no more for `cache.host_gib` than this share of the host's memory that all else leaves to each"
        " of the machine's ranks; null: all of it must fit",
        default=None,
        least=0.01,
        most=1.0,
    )
    tier: dict[str, Any] | None = key(
        "where pages rest below `cache.host_gib`, so that a restart, or another engine, finds them: `kind`"
        " disk (with `path`, a folder) or redis (with `url`, and `password_file`), `gib`, the most that all"
        " pages there take, `wait_s`, how long a request waits for its pages (0.5), `key_file`, a secret with"
        " which they are signed, and `open`, which lets redis be on another machine without; null: nowhere",
        default=None,
    )
    prefix_sharing: bool = key(
        "let requests whose prompts begin alike share the pages of that beginning", default=True
    )
    compact_every_steps: int = key(
        "the steps from one compaction, which moves held pages to the low end of the cache, to the next; 0:"
        " none",
        default=0,
        least=0,
        most=2**31 - 1,
    )
    compact_pages_per_step: int = key(
        "the most pages moved in one step of a compaction; 0: all at once", default=0, least=0, most=2**31 - 1
    )
    events: str | None = key(
        "where the engine publishes which pages it holds, tcp://HOST:PORT or ipc://PATH; what was missed is"
        " sent again from the next port. They hold the tokens of prompts",
        default=None,
    )
    events_key_file: Path | None = key(
        "events: a file of a secret of at least 32 bytes, which engine and router prove to each other and by"
        " which they encrypt; null: whoever reaches the two ports reads them, and is believed in their place",
        default=None,
    )
    events_open: bool = key(
        "let events have an address beyond this machine without events_key_file: for a network that nobody"
        " else reaches",
        default=False,
    )
    events_topic: str = key("the topic of `cache.events`", default="kv-events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model, a machine and the numbers to serve it with; raises RecipeError for contradictory values."""

    model: ModelSection
    device: DeviceSection
    cache: CacheSection
    scheduler: SchedulerSection
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    adapters: AdaptersSection = field(default_factory=AdaptersSection)
    server: ServerSection = field(default_factory=ServerSection)

    def __post_init__(self) -> None:
        for each in keys_of(Recipe):
            each.check(self.value(each.name))
        for problem in self._contradictions():
            raise problem

    def value(self, name: str) -> Any:
        """Return the value of a dotted key."""
        section, _, leaf = name.partition(".")
        return getattr(getattr(self, section), leaf)

    def described(self) -> dict[str, dict[str, Any]]:
        """Return the value of every key by section, for JSON: paths are text, relative to the repository."""
        sections: dict[str, dict[str, Any]] = {}
        for each in keys_of(Recipe):
            section, _, leaf = each.name.partition(".")
            value = self.value(each.name)
            sections.setdefault(section, {})[leaf] = from_root(value) if isinstance(value, Path) else value
        return sections

    def _contradictions(self) -> Iterator[RecipeError]:
        """Yield an error for keys whose values are each in range, and contradict each other."""
        yield from self._one_of("model.path", "model.config")
        yield from self._one_of("cache.num_pages", "cache.memory_gib", "cache.memory_fraction")
        if self.model.config is not None and self.model.weights == "checkpoint":
            yield RecipeError(
                ("model.weights", "model.config"),
                "a model.config has no checkpoint",
                "set model.weights to random, or name a model.path",
                value=self.model.weights,
            )
        if self.model.config is not None and self.model.config_overrides:
            yield RecipeError(
                ("model.config_overrides", "model.config"),
                "read only where model.path is set, and model.config is in its place",
                "write the fields into model.config",
                value=self.model.config_overrides,
            )
        if self.cache.compact_pages_per_step and not self.cache.compact_every_steps:
            yield RecipeError(
                ("cache.compact_pages_per_step", "cache.compact_every_steps"),
                "read only where cache.compact_every_steps is set, and it is 0",
                "set it, or leave this out",
                value=self.cache.compact_pages_per_step,
            )
        if self.cache.host_fraction is not None and not self.cache.host_gib:
            yield RecipeError(
                ("cache.host_fraction", "cache.host_gib"),
                "read only where cache.host_gib is set, and it is not",
                "set it, or leave this out",
                value=self.cache.host_fraction,
            )
        yield from self._device_contradictions()
        yield from event_contradictions(
            self.cache.events,
            is_sharing=self.cache.prefix_sharing,
            is_open=self.cache.events_open or self.cache.events_key_file is not None,
        )
        yield from context_contradictions(self.parallel, self.cache.page_size)
        yield from page_contradictions(
            self.server,
            is_sharing=self.cache.prefix_sharing,
            parallel=self.parallel,
            drafts=self.speculation.kind,
        )
        yield from answer_contradictions(self.server.tool_format, self.server.reasoning)
        yield from tier_contradictions(
            self.cache.tier,
            is_sharing=self.cache.prefix_sharing,
            host_gib=self.cache.host_gib,
        )
        yield from int8_contradictions(self.cache.dtype, self.device.kind, self.device.attention)
        yield from adapter_contradictions(self.adapters)
        yield from contradictions(self.scheduler)
        yield from speculation_contradictions(self.speculation, self.device.kind)
        yield from placement_contradictions(self.parallel)
        yield from self._length_contradictions()

    def _length_contradictions(self) -> Iterator[RecipeError]:
        cache, longest = self.cache, self.scheduler.max_request_tokens
        if cache.num_pages is not None and longest is not None:
            capacity = (cache.num_pages - 1) * cache.page_size + 1  # the last token is never cached
            if longest > capacity:
                pages = -(-(longest - 1) // cache.page_size) + 1
                yield RecipeError(
                    ("scheduler.max_request_tokens", "cache.num_pages", "cache.page_size"),
                    f"{longest} is more than the {capacity} that fit into {cache.num_pages} pages of"
                    f" {cache.page_size}",
                    f"lower it, or set cache.num_pages to {pages}",
                    value=longest,
                    limit=capacity,
                )

    def _device_contradictions(self) -> Iterator[RecipeError]:
        device = self.device
        for leaf, kinds in KINDS_OF.items():
            said = getattr(device, leaf)
            if said not in (None, False, 0, "auto") and device.kind not in kinds:
                yield RecipeError(
                    (f"device.{leaf}", "device.kind"),
                    f"read only where device.kind is {' or '.join(kinds)}, and it is {device.kind}",
                    "leave it out",
                    value=said,
                )
        if self.model.kept_in is not None and device.kind == "cpu":
            yield RecipeError(
                ("model.kept_in", "device.kind"),
                "device.kind is cpu, whose weights would be in the host's memory twice",
                "leave it out",
                value=self.model.kept_in,
            )
        if self.model.kept_in is not None and self.model.weights == "random":
            yield RecipeError(
                ("model.kept_in", "model.weights"),
                "model.weights is random, and only what is read from a checkpoint is kept",
                "leave it out",
                value=self.model.kept_in,
            )
        if device.virtual_fp32 and not device.virtual:
            yield RecipeError(
                ("device.virtual_fp32", "device.virtual"),
                "no product takes float32 in its fused operators, only the stand-in can be made to",
                "set device.virtual to true, or leave this out",
                value=True,
            )
        if device.virtual_release and not device.virtual:
            yield RecipeError(
                ("device.virtual_release", "device.virtual"),
                "an NPU has the torch_npu that is installed, only the stand-in can take the calls of another",
                "set device.virtual to true, or leave this out",
                value=device.virtual_release,
            )
        if device.batch_invariant and device.attention == "reference":
            yield RecipeError(
                ("device.batch_invariant", "device.attention"),
                "device.attention is reference, whose sums depend on how a prompt was cut",
                "set device.batch_invariant to false, or device.attention to fused",
                value=True,
            )
        if device.graphs and device.attention == "reference":
            yield RecipeError(
                ("device.graphs", "device.attention"),
                "device.attention is reference, which synchronizes with the host at every span and cannot"
                " be captured",
                "set device.graphs to 0, or device.attention to fused",
                value=device.graphs,
                limit=0,
            )

    def _one_of(self, *names: str) -> Iterator[RecipeError]:
        given = [name for name in names if self.value(name) is not None]
        if not given:
            is_model = names[0] == "model.path"
            fix = "add model.path=FOLDER, or name the folder in place of the recipe" if is_model else ""
            yield RecipeError(names, f"required, or {' or '.join(names[1:])} in its place", fix)
        elif len(given) > 1:
            yield RecipeError(
                tuple(given),
                f"excludes {given[1]}, and both are set",
                "set one of them to null",
                value=self.value(given[0]),
            )
