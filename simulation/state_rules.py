"""Count the prompt tokens that are computed, by rules for keeping recurrent states and by the real scheduler.

A rule says where states are kept, in words short enough for a loop without a scheduler: requests come one
after the other, pages and states each have a fixed part of the memory, and the least recently used go first.
The bound keeps every page of keys and values and needs no state. `served_share` counts the same of an engine,
and `foreseen_share` of whoever knows all turns to come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams, TokenIds
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from simulation.replica import Clock, SimulatedRunner, Speaker
from simulation.shared_prompts import Turn

TOKEN_BYTES = 24 * 2**10  # Qwen3-Next's keys and values: 12 layers in bfloat16
STATE_BYTES = 77_266_944  # 36 layers: states in float32, and the inputs of convolutions in bfloat16
STEP_S = 1e-3  # what every simulated step takes; shares do not depend on it


@dataclass(frozen=True, slots=True)
class KeepingRule:
    """Where an engine keeps states, in blocks of `block_tokens`, the smallest part of a prompt it finds."""

    name: str
    block_tokens: int
    step_ends: int = (
        0  # states are kept at the last block end of each step of so many tokens; 0: they are not
    )
    prompt_ends: bool = False
    answer_ends: bool = False
    branches: bool = False  # states where a prompt parts from pages that are there, but have none
    num_running: int = 0  # further states that an engine holds for what runs, and cannot keep
    needs_states: bool = True


# What others do, as their pull requests and their users' complaints describe it; 528 tokens is the least
# block that vLLM chooses for such models, and Qwen3-Next's states in float32 need twice that
VLLM = KeepingRule("vLLM, step ends", 528, step_ends=2048)
VLLM_BRANCHES = KeepingRule("vLLM, and branches", 528, step_ends=2048, branches=True)
SGLANG = KeepingRule("SGLang", 64, prompt_ends=True, answer_ends=True, branches=True, num_running=2)
STATELESS = KeepingRule("no states needed", 128, needs_states=False)


@dataclass(frozen=True, slots=True)
class SplitMemory:
    """How many tokens and how many states fit."""

    num_tokens: int
    num_states: int

    @classmethod
    def split(cls, num_bytes: int, state_fraction: float) -> SplitMemory:
        """Return what fits if this fraction is for kept states, as `cache.state_fraction` says."""
        num_states = int(state_fraction * num_bytes / STATE_BYTES)
        return cls((num_bytes - num_states * STATE_BYTES) // TOKEN_BYTES, num_states)


UNBOUNDED = SplitMemory(2**62, 0)


class _Kept:
    """The pages and states that a rule has kept, by the names of prefixes; the oldest stand first."""

    def __init__(self, rule: KeepingRule, memory: SplitMemory) -> None:
        self._rule = rule
        self._most_pages = memory.num_tokens // rule.block_tokens
        self._most_states = max(0, memory.num_states - rule.num_running)
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._states: OrderedDict[int, None] = OrderedDict()

    def find(self, names: Sequence[int]) -> tuple[int, int]:
        """Return how many blocks of a prefix are there, and how many of these a request starts behind."""
        found = next((at for at, name in enumerate(names) if name not in self._pages), len(names))
        start = found
        while self._rule.needs_states and start and names[start - 1] not in self._states:
            start -= 1
        return found, start

    def keep(self, names: Sequence[int], start: int, wanted: set[int]) -> None:
        """Keep the blocks of a request that started behind `start` of them, and the wanted states."""
        for name in reversed(names):  # the deepest are the first to go
            self._pages[name] = None
            self._pages.move_to_end(name)
        touched = {start} if self._rule.needs_states else set()
        for at in sorted(touched | {each for each in wanted if each > start}):
            if at:
                self._states[names[at - 1]] = None
                self._states.move_to_end(names[at - 1])
        while len(self._pages) > self._most_pages:
            name, _ = self._pages.popitem(last=False)
            self._states.pop(name, None)
        while len(self._states) > self._most_states:
            self._states.popitem(last=False)


def ruled_share(turns: Sequence[Turn], rule: KeepingRule, memory: SplitMemory) -> float:
    """Return the share of prompt tokens that must be computed where one rule keeps states."""
    kept, size, total, computed = _Kept(rule, memory), rule.block_tokens, 0, 0
    for turn in turns:
        length = len(turn.prompt)
        names = _names(turn, size)
        last = (length - 1) // size  # a prompt that comes again has to compute its last token
        found, start = kept.find(names[:last])
        total, computed = total + length, computed + length - start * size
        wanted: set[int] = set()
        if rule.step_ends:
            wanted |= {end // size for end in range(start * size + rule.step_ends, length, rule.step_ends)}
            wanted.add(last)
        if rule.prompt_ends:
            wanted.add(last)
        if rule.answer_ends:
            wanted.add(len(names))
        if rule.branches:
            wanted.add(found)
        kept.keep(names, start, wanted)
    return computed / total


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages of a prefix, with a state behind them, that wait for the next turn that begins with them."""

    turn: int  # the next
    start: int  # tokens before them
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * TOKEN_BYTES + STATE_BYTES

    def cost(self, now: int) -> float:
        """Return the bytes that each saved token takes, times the turns for which they are kept."""
        return (self.turn - now) * self.num_bytes / self.num_tokens


def foreseen_share(turns: Sequence[Turn], num_bytes: int) -> float:
    """Return the share that must be computed by whoever knows all turns to come, and so what to keep.

    Turns come one after the other. Pages and states are kept in one memory, whatever the number of each, and
    a state may stand behind any page. Where they do not fit, the part that costs the most for what it saves
    is dropped first. Among parts of one size this is Belady's rule, than which there is no better.
    """
    size, last_use = STATELESS.block_tokens, dict[int, int]()
    parts: list[list[_Part]] = [[] for _ in turns]  # A part waits from the turn of its place on.
    for number, turn in enumerate(turns):
        names, at = _names(turn, size), 0
        found = names[: (len(turn.prompt) - 1) // size]
        for use, run in groupby(last_use[name] for name in found if name in last_use):
            num_tokens = size * len(list(run))
            parts[use].append(_Part(number, at, num_tokens))
            at += num_tokens
        last_use.update(dict.fromkeys(names, number))
    kept: list[_Part] = []
    starts = [0] * len(turns)
    for now in range(len(turns)):
        for part in sorted((each for each in kept if each.turn == now), key=lambda each: each.start):
            if part.start == starts[now]:  # nothing is gone on from behind a gap
                starts[now] += part.num_tokens
        kept = [each for each in kept if each.turn > now] + parts[now]
        kept.sort(key=lambda each: each.cost(now))
        while sum(each.num_bytes for each in kept) > num_bytes:
            kept.pop()
    return 1 - sum(starts) / sum(len(turn.prompt) for turn in turns)


def _names(turn: Turn, size: int) -> list[int]:
    """Return a name for each whole block, which stands for all tokens before its end."""
    known = turn.prompt.tobytes() + turn.answer.tobytes()
    width, name, names = size * turn.prompt.itemsize, 0, []
    for at in range(0, len(known) - width + 1, width):
        name = hash((name, known[at : at + width]))
        names.append(name)
    return names


class PromptCounter:
    """A cost model that counts the tokens of prompts in each step; all steps take the same time."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Count what the batch computes of prompts, again if a request was preempted."""
        ends = slots.num_prompt[batch.slots]
        self.num_tokens += int((ends.clip(max=batch.stops) - batch.starts).clip(min=0).sum())
        return STEP_S


def served_share(turns: Sequence[Turn], scheduler: Scheduler) -> float:
    """Return the share of prompt tokens that an engine computes which serves these turns.

    They are sent in order, each once a slot is free and the turn before it in its conversation has ended.
    """
    counter, clock = PromptCounter(), Clock()
    answers: dict[str, TokenIds] = {str(number): turn.answer for number, turn in enumerate(turns)}
    speaker = Speaker(scheduler.slots, answers)
    engine = Engine(scheduler, SimulatedRunner(clock, counter, scheduler.slots, speaker), clock)
    running: dict[str, int] = {}  # conversations, by the ids of their requests
    for number, turn in enumerate(turns):
        while len(running) == scheduler.slots.num_slots or turn.conversation in running.values():
            _step(engine, running)
        params = SamplingParams(max_tokens=len(turn.answer), temperature=0.0, ignore_eos=True)
        engine.add(Request(str(number), turn.prompt, params))
        running[str(number)] = turn.conversation
    while running:
        _step(engine, running)
    return counter.num_tokens / sum(len(turn.prompt) for turn in turns)


def _step(engine: Engine, running: dict[str, int]) -> None:
    step = engine.step()
    for request in () if step is None else step.finished:
        assert request.finish_reason == "length", f"request {request.id}: {request.error}"
        del running[request.id]
