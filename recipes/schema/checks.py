"""Check keys of a recipe against each other: values that are each in range, and contradict one another.

Each function yields the errors of one subject: answers, page events, pages that engines exchange, and the
scheduler with its policies.
"""

from __future__ import annotations

from collections.abc import Iterator

from borders.addresses import is_loopback
from borders.numbers import PORTS, POSITIVE
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.recipe_error import RecipeError, in_words
from recipes.schema.scheduler_defaults import completed
from recipes.schema.scheduler_section import READ_WHERE, UNSAID, WHOLE, SchedulerSection
from recipes.schema.server_section import ServerSection


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


def int8_contradictions(dtype: str, kind: str, attention: str) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.dtype: int8`, which fused attention reads on a CPU and on an NPU."""
    if dtype == "int8" and attention != "reference" and kind == "cuda":
        yield RecipeError(
            ("cache.dtype", "device.attention"),
            f"only plain torch reads int8 keys and values on cuda, and device.attention is {attention}",
            "set device.attention to reference, or this to auto",
            value=dtype,
        )


def event_contradictions(endpoint: str | None, *, is_sharing: bool, is_open: bool) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.events`; `is_open` says that it may have an address of any machine."""
    kind, _, rest = (endpoint or "").partition("://")
    host = rest.rpartition(":")[0]
    if kind == "tcp" and not is_open and not is_loopback(host):
        yield RecipeError(
            ("cache.events", "cache.events_key_file"),
            f"{in_words(host)} is not this machine alone, and neither side would prove who it is",
            "set cache.events_key_file to a secret (openssl rand -hex 32), or cache.events_open to true where"
            " a firewall lets only the router reach both ports",
            value=endpoint,
        )
    if endpoint is not None and not is_sharing:
        yield RecipeError(
            ("cache.events", "cache.prefix_sharing"),
            "no page can be found, so that there is nothing to publish",
            "set cache.prefix_sharing to true, or leave this out",
            value=endpoint,
        )


MOST_STAGES = 2  # stages of an engine that exchanges pages


def page_contradictions(
    server: ServerSection, *, is_sharing: bool, parallel: ParallelSection, drafts: str
) -> Iterator[RecipeError]:
    """Yield what contradicts `server.pages_at` and `server.prompt_replicas`.

    `drafts` is the value of speculation.kind.
    """
    pages_at, prompt_replicas = server.pages_at, server.prompt_replicas
    asked = {"server.pages_at": pages_at, "server.prompt_replicas": list(prompt_replicas) or None}
    for name, endpoints in {"server.pages_at": [pages_at], "server.prompt_replicas": prompt_replicas}.items():
        for endpoint in endpoints:
            if endpoint is not None:
                yield from _address_contradictions(name, endpoint, server)
    yield from _credential_contradictions(server)
    yield from _mooncake_contradictions(server)
    if pages_at in prompt_replicas and pages_at is not None:
        yield RecipeError(
            ("server.pages_at", "server.prompt_replicas"),
            "names this engine among those that compute for it",
            "leave it out of one of them",
            value=pages_at,
        )
    for name in [name for name, value in asked.items() if value is not None]:
        if server.weights_root is not None:
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
        if parallel.pipeline > MOST_STAGES:
            yield RecipeError(
                (name, "parallel.pipeline"),
                f"there are {parallel.pipeline} stages, and the first of more than {MOST_STAGES} may wait for"
                " a step of the last while that waits for it to take a part",
                f"leave this out, or set parallel.pipeline to {MOST_STAGES} or less",
                value=asked[name],
                limit=MOST_STAGES,
            )
        if parallel.ranks > 1 and drafts in ("draft", "eagle3", "mtp"):
            yield RecipeError(
                (name, "speculation.kind"),
                f"it is {drafts}, whose layers {parallel.ranks} ranks do not divide as the model's",
                "leave this out, or set speculation.kind to ngram, suffix or none",
                value=asked[name],
            )


_TLS = ("pages_tls_certificate", "pages_tls_private_key", "pages_tls_authority")


def _address_contradictions(name: str, endpoint: str, server: ServerSection) -> Iterator[RecipeError]:
    """Yield what is wrong with an address of pages: its form, or that others reach it without a proof."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or PORTS.parse(port) is None:
        yield RecipeError(name, "is no tcp://HOST:PORT", "write it so", value=endpoint)
    elif not (
        is_loopback(host) or server.pages_key_file or server.pages_tls_certificate or server.pages_open
    ):
        yield RecipeError(
            (name, "server.pages_key_file"),
            f"{in_words(host)} is not this machine alone, and neither side would prove who it is",
            "set server.pages_key_file to a secret (openssl rand -hex 32), or server.pages_open to true where"
            " nobody else reaches this network",
            value=endpoint,
        )


def _mooncake_contradictions(server: ServerSection) -> Iterator[RecipeError]:
    """Yield what contradicts `server.page_transport: mooncake`, and keys that nothing else reads."""
    names = ("server.mooncake_host", "server.page_transport")
    if server.page_transport != "mooncake":
        if server.mooncake_host is not None:
            problem = f"read only where server.page_transport is mooncake, and it is {server.page_transport}"
            yield RecipeError(names, problem, "leave it out", value=server.mooncake_host)
        if server.mooncake_protocol != "tcp":
            names = "server.mooncake_protocol", "server.page_transport"
            problem = f"read only where server.page_transport is mooncake, and it is {server.page_transport}"
            yield RecipeError(names, problem, "leave it out", value=server.mooncake_protocol)
        return
    if server.mooncake_host is None:
        yield RecipeError(
            names,
            "required where server.page_transport is mooncake, and missing",
            "set it to the address at which the other engine reaches this machine",
        )
    if not server.pages_open:
        yield RecipeError(
            ("server.page_transport", "server.pages_open"),
            "Mooncake's transfer engine listens at all addresses and asks nobody who it is, and"
            " server.pages_open is false",
            "set server.pages_open to true where nobody else reaches this machine, or this to tcp",
            value="mooncake",
        )


def _credential_contradictions(server: ServerSection) -> Iterator[RecipeError]:
    """Yield files of TLS without the others, and credentials where no pages are exchanged."""
    named = {name: getattr(server, name) for name in _TLS}
    missing = [name for name, path in named.items() if path is None]
    for name, path in (named | {"pages_key_file": server.pages_key_file}).items():
        if path is not None and server.pages_at is None and not server.prompt_replicas:
            yield RecipeError(
                (f"server.{name}", "server.pages_at"),
                "read only where server.pages_at or server.prompt_replicas is set",
                "set one of them, or leave this out",
                value=path,
            )
    for name in missing if len(missing) < len(_TLS) else ():
        others = " and ".join(f"server.{each}" for each in _TLS if named[each] is not None)
        yield RecipeError(
            f"server.{name}", f"required where {others} is set, and missing", "set all three, or none"
        )


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
