"""The order of eviction against an ordered dict, which is a linked list and holds no dead entries."""

from collections import OrderedDict

import numpy as np
import pytest

from kv_cache import eviction_order
from kv_cache.eviction_order import EvictionOrder


@pytest.mark.parametrize("seed", range(4))
def test_pages_come_in_the_order_of_a_linked_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    monkeypatch.setattr(eviction_order, "_MOST_DEAD", 20)
    monkeypatch.setattr(eviction_order, "_LEAST_LOOK", 3)
    num_pages = 60
    order, wanted = EvictionOrder(num_pages), OrderedDict[int, None]()

    def some(pages: list[int]) -> np.ndarray:
        return random.permutation(np.array(pages, dtype=np.int64))[: random.integers(0, 12)]

    for _ in range(600):
        here, others = list(wanted), [page for page in range(1, num_pages) if page not in wanted]
        action = int(random.integers(6))
        match action:
            case 0 | 1:
                pages = some(others)
                order.append(pages)
                wanted.update(dict.fromkeys(pages.tolist()))
            case 2:
                pages = some(here)
                order.move_to_front(pages)
                for page in pages[::-1].tolist():
                    wanted.move_to_end(page, last=False)
            case 3:
                pages = some(here)
                order.remove(pages)
                for page in pages.tolist():
                    del wanted[page]
            case 4:
                count = int(random.integers(0, len(here) + 1))
                assert order.first(count).tolist() == here[:count]
                order.remove(order.first(count // 2))
                for page in here[: count // 2]:
                    del wanted[page]
            case _:
                targets = some(others)
                sources = random.permutation(num_pages - 1)[: len(targets)] + 1
                sources = sources[~np.isin(sources, targets)]
                target_of = dict(zip(sources.tolist(), targets.tolist()))
                order.rename(sources, targets[: len(sources)])
                wanted = OrderedDict((target_of.get(page, page), None) for page in wanted)
                num_pages = int(random.integers(max(wanted, default=1) + 1, 80))
                order.resize(num_pages)
        assert order.pages.tolist() == list(wanted)
        assert len(order) == len(wanted)
        every = np.arange(num_pages)
        assert order.has(every).tolist() == [page in wanted for page in every.tolist()]
        if action < 3 and len(pages):
            assert sum(len(pages) for _, pages in order._segments) <= 2 * len(wanted) + 20
