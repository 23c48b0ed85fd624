"""The adaptive chunk against a device whose cost is known, with noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.policy import Busy
from continuous_batching.policies.prefill_budget import AdaptiveChunks
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import Coefficients, StepCosts, StepTime
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching.test_step_time import batch, cost_s
from tests.thorough import cases

COST = Coefficients(step_s=8e-3, token_s=60e-6, context_s=0.15e-6, pair_s=20e-9)


class Device:
    """Answers at once, and says how long it would have taken: the model's own form, times noise."""

    def __init__(self, noise: float) -> None:
        self.now_s = 0.0
        self._noise = noise
        self._random = np.random.default_rng(0)

    def clock(self) -> float:
        return self.now_s

    def run(self, batch: Batch) -> Sampled:
        self.now_s += cost_s(batch, StepCosts(COST, COST)) * float(self._random.lognormal(0, self._noise))
        return Sampled(np.full(len(batch.sampled), 7, dtype=np.int64))

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nobody resizes")


class Load:
    """Requests that keep a number of slots decoding, and prompts that keep coming beside them."""

    def __init__(self, target_itl_s: float, noise: float, num_slots: int = 96) -> None:
        slots = SlotPool(num_slots, 6000, 16)
        self.device = Device(noise)
        step_time = StepTime()
        self.adaptive = AdaptiveChunks(
            step_time, target_itl_s, min_tokens=32, max_tokens=2048, tile_tokens=32
        )
        self.scheduler = Scheduler(
            slots,
            PagePool(num_slots * 380),
            StallFree(self.adaptive),
            step_time=step_time,
            prefix_sharing=False,
            max_batch_tokens=2048 + num_slots,
            vocab_size=10,
        )
        self.engine = Engine(self.scheduler, self.device, self.device.clock)
        self._random = np.random.default_rng(1)
        self._number = 0
        self.batches: list[Batch] = []

    def ask(self, num_prompt: int, max_tokens: int) -> None:
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        prompt = np.ones(num_prompt, dtype=np.int32)
        self.engine.add(Request(str(self._number), prompt, params, arrival_s=self.device.now_s))

    def run(self, num_steps: int, num_decodes: int) -> np.ndarray:
        """Times between tokens, of each token, while there is always a prompt to compute."""
        itl_s = []
        for _ in range(num_steps):
            running = len(self.engine.slots.busy) + len(self.scheduler.waiting)
            for _ in range(num_decodes + 2 - running):
                self.ask(int(self._random.integers(500, 4000)), int(self._random.integers(50, 400)))
            before_s = self.device.now_s
            step = self.engine.step()
            assert step is not None
            self.batches.append(step.batch)
            num = int((step.batch.starts >= self.engine.slots.num_prompt[step.batch.slots]).sum())
            itl_s += [self.device.now_s - before_s] * num
        return np.array(itl_s)


@pytest.mark.slow
@pytest.mark.parametrize("noise", cases([0.08], [0.02, 0.08]))
def test_the_target_is_held_within_a_tenth_while_the_load_doubles_and_halves(noise: float) -> None:
    target_s = 0.040
    load = Load(target_s, noise)
    load.run(300, num_decodes=24)  # learns
    phases = [load.run(700, num_decodes) for num_decodes in (24, 48, 96, 48, 24)]
    for itl_s in (*phases, np.concatenate(phases)):
        assert 0.9 * target_s <= np.percentile(itl_s, 99) <= 1.1 * target_s


def test_steps_are_whole_tiles_and_chunks_within_their_bounds() -> None:
    load = Load(0.040, noise=0.02)
    load.run(400, num_decodes=24)
    for made in load.batches[100:]:
        lens = made.stops - made.starts
        chunk = int(lens[lens > 1].sum())
        assert chunk <= 2048
    sizes = [made.num_tokens for made in load.batches[100:] if made.num_tokens > 100]
    assert np.mean([size % 32 == 0 for size in sizes]) > 0.9, "but where a prompt's last chunk is shorter"


def test_prompts_get_on_though_the_target_cannot_be_met_and_decodes_do_though_it_is_far() -> None:
    slow = Load(0.005, noise=0.02)  # the target is less than one decode step
    slow.run(300, num_decodes=24)
    chunks = [
        int((made.stops - made.starts)[made.stops - made.starts > 1].sum()) for made in slow.batches[100:]
    ]
    assert set(chunks) <= {*range(33)}
    assert np.median(chunks) == 32
    fast = Load(10.0, noise=0.02)
    fast.run(200, num_decodes=24)
    assert max(made.num_tokens for made in fast.batches) <= 2048 + 24


def test_nothing_is_held_back_where_nobody_decodes_and_little_is_staked_at_first() -> None:
    adaptive = AdaptiveChunks(StepTime(), 0.04, min_tokens=32, max_tokens=2048, tile_tokens=32)
    alone = Busy(np.array([5000]), np.array([0]), np.array([False]))
    assert adaptive.limit(alone, 4096).total == 2048
    beside = Busy(np.array([1, 1, 5000]), np.array([9, 9, 0]), np.array([True, True, False]))
    assert adaptive.limit(beside, 4096).total == 32, "the least"
    adaptive.observe(batch(np.array([0]), np.array([100])), 0.001)
    assert adaptive.limit(beside, 4096).total <= 200, "twice the most that was tried"
