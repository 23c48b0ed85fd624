"""Recognise the keys of other engines, and of the articles that this project started from, in a recipe.

A key whose meaning is the same is taken as ours, with one line that says so; any other is refused with the
key of ours that is nearest. docs/recipe_keys.md has the table, as `python -m recipes names` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ForeignKeys:
    """Names of one setting elsewhere, and our keys for it; `same`: each value means what ours means.

    With several names and as many keys, each name has the key at its own place. Names of one key may come as
    its opposite.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    remark: str = ""
    same: bool | Literal["opposite"] = False

    def key_of(self, name: str) -> str | None:
        """Return our key for a name, or None where there is none."""
        if not self.keys:
            return None
        is_paired = len(self.keys) == len(self.names)
        return self.keys[self.names.index(name)] if is_paired else self.keys[0]

    def refusal(self, name: str) -> tuple[str, str]:
        """Return the problem and the fix for a name that is not taken as ours."""
        remark = f" ({self.remark})" if self.remark else ""
        if not self.keys:
            return f"is a key of another engine, and there is none here{remark}", "leave it out"
        ours = self.key_of(name) if len(self.keys) == len(self.names) else " or ".join(self.keys)
        return f"is a key of another engine, whose values mean something else here{remark}", f"set {ours}"


def _same(names: str, keys: str, remark: str = "") -> ForeignKeys:
    return ForeignKeys(tuple(names.split()), tuple(keys.split()), remark, same=True)


def _near(names: str, keys: str = "", remark: str = "") -> ForeignKeys:
    return ForeignKeys(tuple(names.split()), tuple(keys.split()), remark)


_OPTION = "an option of `scripts.serve`"
FOREIGN = (
    _same("model model_path modelWeightPath", "model.path"),
    _same("hf_overrides", "model.config_overrides"),
    _near("json_model_override_args rope_scaling rope_theta", "model.config_overrides", "a mapping"),
    _near("load_format", "model.weights", "random in place of dummy"),
    _near("trust_remote_code", "", "no code of a checkpoint is ever run"),
    _near("quantize quantization", "model.quantization", "a checkpoint says its own: leave it out"),
    _same("dtype", "model.dtype", "float16 in place of half"),
    _same("max_batch_size max_num_seqs max_bs max_running_requests maxBatchSize", "scheduler.num_slots"),
    _near(
        "max_tokens_per_batch n_slots",
        "cache.num_pages cache.memory_gib cache.memory_fraction",
        "what the cache holds limits what runs, not a step's budget",
    ),
    _same("kv_cache_total_pages num_gpu_blocks_override", "cache.num_pages"),
    _same("block_size cacheBlockSize", "cache.page_size"),
    _same("gpu_memory_utilization mem_fraction_static", "cache.memory_fraction"),
    _same("npuMemSize", "cache.memory_gib", "-1, which lets MindIE choose, is `cache.memory_fraction`"),
    _same("swap_space_gb swap_space cpuMemSize", "cache.host_gib", "`cache.host_fraction` fits it"),
    _near(
        "preemption_mode", "cache.host_gib", "swap where it is set, recompute where it is full or null"
    ),
    _same("enable_prefix_caching", "cache.prefix_sharing"),
    ForeignKeys(("disable_radix_cache",), ("cache.prefix_sharing",), "its opposite", same="opposite"),
    _near("kv_cache_dtype", "cache.dtype"),
    _same(
        "max_num_batched_tokens max_batch_tokens chunk_size", "scheduler.max_batch_tokens", "decodes included"
    ),
    _same("prefill_chunk_size", "scheduler.chunk_tokens"),
    _near("chunked_prefill_size", "scheduler.max_batch_tokens scheduler.chunk_tokens", "a step or a prompt"),
    _near(
        "max_prefill_tokens prefill_decode_ratio maxPrefillTokens",
        "scheduler.prompt_share",
        "where `scheduler.policy` is split",
    ),
    _same(
        "low_chunk_size high_chunk_size",
        "scheduler.min_chunk_tokens scheduler.max_chunk_tokens",
        "where `scheduler.chunk` is dynamic",
    ),
    _same(
        "chunk_schedule_stages chunk_schedule_max_tokens",
        "scheduler.chunk_stages scheduler.staged_tokens",
        "likewise",
    ),
    _same("target_latency_ms", "scheduler.target_itl_ms", "where `scheduler.chunk` is adaptive"),
    _same("long_prefill_token_threshold", "scheduler.long_prompt_tokens", "with the next one"),
    _same("max_long_partial_prefills", "scheduler.max_long_prefills"),
    _same("scheduling_policy", "scheduler.queue", "an unknown one is refused, not taken for fcfs"),
    _near("schedule_policy prefillPolicyType", "scheduler.queue"),
    _same("max_wait_time_ms", "scheduler.max_wait_ms", "only static waits for others"),
    _near("maxQueueDelayMicroseconds", "scheduler.max_wait_ms", "in ms; only static waits for others"),
    _same("max_waiting_requests", "scheduler.max_waiting_requests"),
    _same("max_seq_len max_model_len context_length maxSeqLen", "scheduler.max_request_tokens"),
    _near("maxIterTimes", "", "a request's own max_tokens says it"),
    _near(
        "enable_preemption scheduler_interval_ms n_workers enable_chunked_prefill",
        "",
        "a request is preempted only when pages run out, a step follows the last one at once, as many batches"
        " are in flight as `parallel.pipeline` says, and stall_free cuts prompts",
    ),
    _near("enforce_eager disable_cuda_graph", "device.graphs", "0: none"),
    _same("cuda_graph_max_bs max_cudagraph_capture_size", "device.graphs"),
    _near("attention_backend", "device.attention"),
    _same("tensor_parallel_size tp_size tp", "parallel.tensor"),
    _near("worldSize npuDeviceIds", "parallel.tensor", "ASCEND_RT_VISIBLE_DEVICES says which devices"),
    _same("pipeline_parallel_size pp_size pp", "parallel.pipeline"),
    _near("enable_expert_parallel ep_size ep", "parallel.expert", "a number that divides `parallel.tensor`"),
    _same("decode_context_parallel_size dcp_size dcp", "parallel.context", "it divides `parallel.tensor`"),
    _near("data_parallel_size dp_size dp", "", "scripts.route spreads requests over engines"),
    _same("NumSpecTokens num_spec_tokens num_speculative_tokens", "speculation.max_tokens", "with a kind"),
    _near("speculative_config", "speculation.kind"),
    _near(
        "accept_threshold",
        "speculation.accept_threshold",
        "refused: it biases answers; a guess counts if it is what is drawn anyway",
    ),
    _same("max_loras", "adapters.most"),
    _same("max_lora_rank", "adapters.rank"),
    _near("enable_lora", "adapters.most"),
    _same("tool_call_parser", "server.tool_format"),
    _near("enable_auto_tool_choice", "", "tools are called wherever `server.tool_format` is set"),
    _near("reasoning_parser", "server.reasoning", "think, for most"),
    _near("served_model_name host port api_key", "", _OPTION),
)  # fmt: skip
_BY_NAME = {name: each for each in FOREIGN for name in each.names}
# Options of other engines' command lines that take no value; vLLM sets the opposite of `--X` by `--no-X`
SWITCHES = frozenset(
    (
        "trust_remote_code",
        "enable_prefix_caching",
        "disable_radix_cache",
        "enable_preemption",
        "enable_chunked_prefill",
        "enforce_eager",
        "disable_cuda_graph",
        "enable_expert_parallel",
        "enable_lora",
        "enable_auto_tool_choice",
    )
)


def foreign_key(name: str) -> ForeignKeys | None:
    """Return what is known of a name elsewhere; dashes count as underscores, as on a command line."""
    return _BY_NAME.get(name.replace("-", "_"))


def names_table() -> str:
    """Return the names as a Markdown table, for docs/recipe_keys.md."""
    return "".join(f"{row}\n" for row in _rows())


def _rows() -> Iterator[str]:
    yield "| elsewhere | here | taken as ours | remark |"
    yield "|---|---|---|---|"
    for each in FOREIGN:
        names, keys = (", ".join(f"`{name}`" for name in some) for some in (each.names, each.keys))
        taken = "yes" if each.same else "no"
        yield f"| {names} | {keys or 'none'} | {taken} | {each.remark} |"
