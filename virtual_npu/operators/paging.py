"""Check that the pages of a call exist, that a request holds them, and that they were written before a read.

These rules apply to every operator that accepts a page table or cache places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Conditions, Rule

NULL_PAGE = 0


def outside(pages: Iterable[Tensor], num_pages: int, name: str) -> Iterator[Breach]:
    """Yield page ids that do not exist. `pages` are int64, one tensor for each sequence."""
    for number, ids in enumerate(pages):
        wrong = ids[(ids < 0) | (ids >= num_pages)]
        if len(wrong):
            yield name, f"page {int(wrong[0])} in row {number}, of {num_pages} pages"


def not_held(pages: Iterable[Tensor], conditions: Conditions, name: str) -> Iterator[Breach]:
    """Yield pages that no request holds, if the holders are known; the null page has its own rule."""
    if conditions.held is None:
        return
    held = torch.tensor([NULL_PAGE, *conditions.held()])
    for number, ids in enumerate(pages):
        wrong = ids[~torch.isin(ids, held)]
        if len(wrong):
            yield name, f"page {int(wrong[0])} in row {number}, which no request holds"


def null_page(pages: Iterable[Tensor], conditions: Conditions, name: str) -> Iterator[Breach]:
    """Yield the null page in place of a request's own page, if the conditions know the holders."""
    if conditions.held is None or NULL_PAGE in set(conditions.held()):
        return
    for number, ids in enumerate(pages):
        if bool((ids == NULL_PAGE).any()):
            yield name, f"page {NULL_PAGE} in row {number}"


def unwritten(read: Iterable[tuple[Tensor, Tensor]], names: tuple[str, str]) -> Iterator[Breach]:
    """Yield sequences that read a NaN in a key or value: the mark of a place that was never written."""
    for number, pair in enumerate(read):
        for name, tensor in zip(names, pair):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                at = int(tensor.isnan().flatten(1).any(1).nonzero()[0])
                yield name, f"NaN at place {at} of what sequence {number} reads"


Pages = Callable[[Any], list[Tensor]]


def page_id_rule(name: str, pages: Pages, num_pages: Callable[[Any], int]) -> Rule:
    """Return the rule that the page ids in argument `name` exist."""
    return Rule(
        "page-ids",
        "each page that is read is one of the cache's",
        "op-plugin npu_fused_infer_attention_score_v2: ids are not checked, the caller answers for them",
        "fill the page table before the call",
        lambda asked: outside(pages(asked), num_pages(asked), name),
    )


def holding_rules(name: str, pages: Pages) -> tuple[Rule, ...]:
    """Return the rules on who holds the pages in argument `name`."""
    return (
        Rule(
            "null-page",
            "page 0 belongs to no request, unless the caller says that padding lies there",
            "the engine's own rule: page 0 is the null page, which stands where a row has no page",
            "give the row pages of its own, or list page 0 among those held",
            lambda asked: null_page(pages(asked), conditions_of(asked), name),
        ),
        Rule(
            "pages-held",
            "each page is held by a request while it is read or written",
            "the engine's own rule: a page that no request holds is free for the next one to overwrite",
            "hold the page until the step is done",
            lambda asked: not_held(pages(asked), conditions_of(asked), name),
        ),
    )


def conditions_of(asked: Any) -> Conditions:
    """Return the conditions of a call, or of an object that was read from one."""
    found: Conditions = asked.conditions if isinstance(asked, Call) else asked.call.conditions
    return found
