"""Check that the scheduler's keys do not contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from borders.numbers import POSITIVE
from recipes.schema.recipe_error import RecipeError, in_words
from recipes.schema.scheduler_defaults import completed
from recipes.schema.scheduler_section import READ_WHERE, UNSAID, WHOLE, SchedulerSection


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
