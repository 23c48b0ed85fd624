"""Check keys of a recipe against each other: values that are each in range, and contradict one another.

Each function yields the errors of one subject: answers, page events, pages that engines exchange, and the
scheduler with its policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from borders.numbers import PORTS, POSITIVE
from recipes.schema.recipe_error import RecipeError, in_words
from recipes.schema.scheduler_defaults import completed
from recipes.schema.scheduler_section import READ_WHERE, UNSAID, WHOLE, SchedulerSection


def answer_contradictions(tool_format: str, reasoning: str) -> Iterator[RecipeError]:
    """Yield what contradicts `server.tool_format` or `server.reasoning`.

    Channels hold both reasoning and calls.
    """
    if (tool_format == "harmony") != (reasoning == "harmony"):
        yield RecipeError(
            ("server.tool_format", "server.reasoning"),
            f"calls and thoughts stand on the same channels, and server.reasoning is {reasoning}",
            "set both to harmony, or neither",
            value=tool_format,
        )


# These are ratios of query heads to key-value heads, of 128 numbers each, for which
# npu_fused_infer_attention_score_v2 reads int8 pages in FRACTAL_NZ. It takes a scale for each channel, or one
# for each token that all heads share.
NPU_HEADS = ("10:1", "64:8", "80:8", "128:16")


def int8_contradictions(dtype: str, kind: str, attention: str) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.dtype: int8`, which has one scale for each token and head."""
    if dtype != "int8":
        return
    if kind == "npu":
        yield RecipeError(
            ("cache.dtype", "device.kind"),
            f"an NPU reads int8 keys and values only for {', '.join(NPU_HEADS)} heads of 128, and none with a"
            " scale for each token and head",
            "set it to auto",
            value=dtype,
        )
    if attention != "reference":
        yield RecipeError(
            ("cache.dtype", "device.attention"),
            f"only plain torch reads int8 keys and values, and device.attention is {attention}",
            "set device.attention to reference, or this to auto",
            value=dtype,
        )


def event_contradictions(endpoint: str | None, *, is_sharing: bool) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.events`."""
    if endpoint is not None and not is_sharing:
        yield RecipeError(
            ("cache.events", "cache.prefix_sharing"),
            "no page can be found, so that there is nothing to publish",
            "set cache.prefix_sharing to true, or leave this out",
            value=endpoint,
        )


_OWN_PAGES = ("draft", "eagle3", "mtp")  # kinds of speculation that keep keys of their own beside the model's


def page_contradictions(
    pages_at: str | None,
    prompt_replicas: Sequence[str],
    *,
    is_sharing: bool,
    ranks: int,
    speculation: str,
    weights_root: Path | None,
) -> Iterator[RecipeError]:
    """Yield what contradicts `server.pages_at` and `server.prompt_replicas`."""
    asked = {"server.pages_at": pages_at, "server.prompt_replicas": list(prompt_replicas) or None}
    for name, endpoints in {"server.pages_at": [pages_at], "server.prompt_replicas": prompt_replicas}.items():
        for endpoint in endpoints:
            if endpoint is not None and not _is_address(endpoint):
                yield RecipeError(name, "is no tcp://HOST:PORT", "write it so", value=endpoint)
    if pages_at in prompt_replicas and pages_at is not None:
        yield RecipeError(
            ("server.pages_at", "server.prompt_replicas"),
            "names this engine among those that compute for it",
            "leave it out of one of them",
            value=pages_at,
        )
    for name in [name for name, value in asked.items() if value is not None]:
        if weights_root is not None:
            yield RecipeError(
                (name, "server.weights_root"),
                "engines that exchange pages compare their weights once, when they connect",
                "leave one of them out",
                value=asked[name],
            )
        if not is_sharing:
            yield RecipeError(
                (name, "cache.prefix_sharing"),
                "pages from elsewhere are found as shared ones are",
                "set cache.prefix_sharing to true, or leave this out",
                value=asked[name],
            )
        if ranks > 1:
            yield RecipeError(
                (name, "parallel"),
                f"pages are exchanged between engines of one rank, and there are {ranks}",
                "leave this out, or set parallel.tensor and parallel.pipeline to 1",
                value=asked[name],
            )
        if speculation in _OWN_PAGES:
            yield RecipeError(
                (name, "speculation.kind"),
                f"what {speculation} has of a prompt beside the model's pages is not exchanged",
                "leave this out, or set speculation.kind to none, ngram or suffix",
                value=asked[name],
            )


def _is_address(endpoint: str) -> bool:
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    return kind == "tcp" and bool(host) and PORTS.parse(port) is not None


def contradictions(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Yield errors for keys that are each in range, and contradict each other or need another key."""
    yield from _unread(scheduler)
    yield from _missing(scheduler)
    whole = completed(scheduler).section
    yield from _too_much(whole)
    yield from _decodes_without_tokens(whole)
    longest, most = scheduler.max_request_tokens, scheduler.max_batch_tokens
    if scheduler.policy in WHOLE and longest is not None and most is not None and longest > most:
        yield _error(
            "max_request_tokens",
            f"{longest} is more than scheduler.max_batch_tokens ({most}), and scheduler.policy is"
            f" {scheduler.policy}, which computes a prompt in one step",
            "lower the first or raise the second",
            "max_batch_tokens",
            "policy",
            limit=most,
            value=longest,
        )
    for tenant, weight in (scheduler.tenant_weights or {}).items():
        if not isinstance(tenant, str) or POSITIVE.read(weight) is None:
            yield _error(
                "tenant_weights",
                f"{in_words(tenant)}: {in_words(weight)} is not a weight",
                "give a number above 0",
                value=scheduler.tenant_weights,
                limit=0,
            )


def _unread(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Yield errors for keys that are set and not read."""
    for leaf, conditions in READ_WHERE.items():
        said = getattr(scheduler, leaf)
        for other, values in conditions.items():
            chosen = getattr(scheduler, other)
            if said not in (UNSAID[leaf], None) and chosen not in values:
                yield _error(
                    leaf,
                    f"read only where scheduler.{other} is {_one_of(values)}, and it is {_one_of((chosen,))}",
                    "leave it out",
                    other,
                    value=said,
                )


def _missing(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Yield errors for keys that are required and have no sensible default."""
    if scheduler.queue == "deadline" and scheduler.deadline_s is None:
        yield _error("deadline_s", "required where scheduler.queue is deadline", "", "queue")
    if scheduler.max_batch_tokens is None and scheduler.policy not in WHOLE:
        yield _error(
            "max_batch_tokens", f"required where scheduler.policy is {scheduler.policy}", "", "policy"
        )
    pair = {leaf: getattr(scheduler, leaf) for leaf in ("max_long_prefills", "long_prompt_tokens")}
    if sum(value is None for value in pair.values()) == 1:
        missing, said = sorted(pair, key=lambda leaf: pair[leaf] is not None)
        yield _error(missing, f"required where scheduler.{said} is set", "set both or none", said)


def _too_much(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Yield errors for numbers that are larger than the whole of which they are a part."""
    for leaf, other, why in (
        ("num_slots", "max_batch_tokens", "not every slot could decode in every step"),
        ("batch_size", "num_slots", "not every request of a batch would find a slot"),
        ("chunk_tokens", "max_batch_tokens", "no step could hold a chunk"),
        ("max_chunk_tokens", "max_batch_tokens", "no step could hold a chunk"),
        ("min_chunk_tokens", "max_chunk_tokens", "chunks would grow where they are to shrink"),
    ):
        part, most = getattr(scheduler, leaf), getattr(scheduler, other)
        if part is not None and most is not None and part > most:
            yield _error(
                leaf,
                f"{part} is more than scheduler.{other} ({most}), so that {why}",
                "lower the first or raise the second",
                other,
                value=part,
                limit=most,
            )


def _decodes_without_tokens(scheduler: SchedulerSection) -> Iterator[RecipeError]:
    """Yield errors for a split budget that leaves too little for decodes or nothing for prompts."""
    share, most, num_slots = scheduler.prompt_share, scheduler.max_batch_tokens, scheduler.num_slots
    if scheduler.policy != "split" or most is None:
        return
    if share is None:
        yield _error(
            "max_batch_tokens",
            f"{most} leaves too little for prompts beside one decode for each slot ({num_slots})",
            "raise it, or lower scheduler.num_slots",
            "num_slots",
            "policy",
            value=most,
            limit=num_slots + 1,
        )
        return
    left = most - int(share * most)
    if left < num_slots or left == most:
        yield _error(
            "prompt_share",
            f"{share} of {most} tokens leaves {left} for decodes",
            f"it must leave at least scheduler.num_slots ({num_slots}), and some for prompts",
            "max_batch_tokens",
            "num_slots",
            value=share,
            limit=(most - num_slots) / most,
        )


def _one_of(values: tuple[object, ...]) -> str:
    return " or ".join(in_words(each).strip("'") for each in values)


def _error(
    leaf: str, problem: str, fix: str, *others: str, value: object = None, limit: object = None
) -> RecipeError:
    keys = tuple(f"scheduler.{each}" for each in (leaf, *others))
    return RecipeError(keys, problem, fix, value=value, limit=limit)
