"""The number of replicas that is wanted keeps its bounds and changes by one at a time.

A load that lasts only for a moment changes nothing.
"""

from __future__ import annotations

import random

import pytest

from continuous_batching.routing.scaling import FleetDemand, Scale, ScalingBounds, decide
from tests.thorough import cases

BOUNDS = ScalingBounds(2, 4, queued_tokens=1000, more_after_s=5, fewer_after_s=60, slots=10)
CROWDED, CALM = 10**6, 0


def after(
    scale: Scale, seconds: int, ready: int, queued: int, requests: int = 0, start_s: float = 0.0
) -> Scale:
    """What is wanted when the same has been so for so long, asked each second."""
    for second in range(seconds + 1):
        scale = decide(BOUNDS, scale, FleetDemand(ready, queued, requests), start_s + second)
    return scale


def test_what_waits_for_a_while_brings_another() -> None:
    start = Scale(2)
    assert after(start, 4, 2, CROWDED).wanted == 2, "not yet"
    assert after(start, 5, 2, CROWDED).wanted == 3
    assert after(start, 30, 2, 2000).wanted == 2, "as much as is meant to wait"
    assert after(start, 5, 2, 2001).wanted == 3


def test_a_load_that_goes_in_between_begins_anew() -> None:
    scale = after(Scale(2), 4, 2, CROWDED)
    scale = decide(BOUNDS, scale, FleetDemand(2, CALM, 20), 5)
    assert after(scale, 4, 2, CROWDED, start_s=6).wanted == 2


def test_while_one_starts_no_other_is_asked_for() -> None:
    scale = after(Scale(3), 600, 2, CROWDED)
    assert scale.wanted == 3
    assert after(scale, 4, 3, CROWDED, start_s=601).wanted == 3, "it gets its time to take what waits"
    assert after(scale, 5, 3, CROWDED, start_s=601).wanted == 4


def test_one_goes_when_the_others_have_long_had_room() -> None:
    assert after(Scale(3), 59, 3, CALM).wanted == 3
    assert after(Scale(3), 60, 3, CALM).wanted == 2
    assert after(Scale(3), 60, 3, 1000).wanted == 2
    assert after(Scale(3), 600, 3, 1001).wanted == 3, "between the two numbers nothing changes"
    assert after(Scale(3), 60, 3, CALM, requests=10).wanted == 2
    assert after(Scale(3), 600, 3, CALM, requests=11).wanted == 3, "the others would be more than half full"


def test_what_nobody_knows_changes_nothing() -> None:
    scale = after(Scale(3), 4, 3, CROWDED)
    scale = decide(BOUNDS, scale, None, 5)
    assert scale == Scale(3)
    assert after(scale, 4, 3, CROWDED, start_s=6).wanted == 3, "nor does it count as time"


@pytest.mark.parametrize("seed", range(cases(20, 2000)))
def test_any_load_keeps_the_rules(seed: int) -> None:
    """Bounds; one at a time; none more while one starts; and a step back never within the shorter time."""
    rng = random.Random(seed)
    scale, now_s, since_s, ready = Scale(2), 0.0, float("-inf"), 2
    for _ in range(300):
        now_s += rng.choice([0.1, 1.0, 7.0])
        ready = scale.wanted if rng.random() < 0.6 else rng.randrange(scale.wanted + 1)
        queued = rng.choice([0, 900, 1100, 5000, CROWDED])
        demand = None if rng.random() < 0.02 else FleetDemand(ready, queued, rng.randrange(40))
        before, scale = scale, decide(BOUNDS, scale, demand, now_s)
        assert BOUNDS.least <= scale.wanted <= BOUNDS.most
        assert abs(scale.wanted - before.wanted) <= 1
        if scale.wanted > before.wanted:
            assert demand is not None
            assert ready >= before.wanted
            assert now_s - since_s >= BOUNDS.more_after_s
        if scale.wanted < before.wanted:
            assert now_s - since_s >= BOUNDS.fewer_after_s
        if scale.wanted != before.wanted:
            since_s = now_s


def test_a_steady_load_never_makes_them_come_and_go() -> None:
    """A fleet whose queue is what its replicas cannot compute: for each rate it settles."""
    for rate in range(0, 50, 3):  # requests' worth of slots that are busy, of 10 a replica
        scale, changes = Scale(2), []
        for second in range(3000):
            queued = CROWDED if rate > 10 * scale.wanted else 0
            requests = min(rate, 10 * scale.wanted)
            before, scale = scale, decide(BOUNDS, scale, FleetDemand(scale.wanted, queued, requests), second)
            if scale.wanted != before.wanted:
                changes.append(second)
        assert len(changes) <= 2
        assert all(second < 1000 for second in changes)


def test_numbers_that_cannot_be_are_refused() -> None:
    for least, most in ((0, 1), (3, 2), (1, 5000)):
        with pytest.raises(ValueError, match="1 <= LEAST <= MOST <= 1024"):
            ScalingBounds(least, most)
