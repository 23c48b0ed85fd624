"""Draw prompts that share beginnings: five workloads on which rules for keeping recurrent states differ.

Tokens are drawn at random, so that two texts share what is meant to be shared and nothing else. A turn's
answer is known ahead, and the next turn of its conversation repeats it as a client would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Random = np.random.Generator
VOCAB_SIZE = 151_936  # Qwen3-Next's


@dataclass(frozen=True, slots=True)
class Turn:
    """One request; those of one conversation come one after the other."""

    conversation: int
    prompt: Tokens
    answer: Tokens  # all that is generated, with what a model thinks before it answers


def text(random: Random, length: int) -> Tokens:
    """Return a text that no other shares."""
    return random.integers(0, VOCAB_SIZE, length, dtype=np.int32)


def few_shot(random: Random, count: int = 300) -> list[Turn]:
    """Return questions behind the same 2,000 tokens of examples."""
    examples = text(random, 2000)
    return [Turn(each, _joined(examples, text(random, 300)), text(random, 100)) for each in range(count)]


def chats(random: Random, count: int = 120, *, turns: int = 6, strips: bool = True) -> list[Turn]:
    """Return turns of chats under one system prompt, in random order.

    With `strips` the client does not send back what the model thought, as chat templates do.
    """
    system = text(random, 1500)
    prompts = [_joined(system, text(random, 250)) for _ in range(count)]

    def goes_on(prompt: Tokens) -> tuple[Tokens, Tokens]:
        thought, said, asked = text(random, 500), text(random, 350), text(random, 200)
        answer = _joined(thought, said)
        return answer, _joined(prompt, said if strips else answer, asked)

    return _interleaved(random, prompts, turns, goes_on)


def whole_chats(random: Random, count: int = 120) -> list[Turn]:
    """Return turns of chats whose clients send back everything."""
    return chats(random, count, strips=False)


def documents(random: Random, count: int = 40, *, questions: int = 5) -> list[Turn]:
    """Return questions about documents of 8,000 tokens, in random order; each stands behind its document."""
    system = text(random, 600)
    prefixes = [_joined(system, text(random, 8000)) for _ in range(count)]
    order = random.permutation(np.repeat(np.arange(count), questions))
    return [
        Turn(number, _joined(prefixes[document], text(random, 60)), text(random, 200))
        for number, document in enumerate(order.tolist())
    ]


def agents(random: Random, count: int = 12, *, turns: int = 25) -> list[Turn]:
    """Return turns of agents, each of which appends what a tool said to all that was before."""
    system = text(random, 3000)
    prompts = [_joined(system, text(random, 1000)) for _ in range(count)]

    def goes_on(prompt: Tokens) -> tuple[Tokens, Tokens]:
        answer = text(random, 150)
        return answer, _joined(prompt, answer, text(random, 1200))

    return _interleaved(random, prompts, turns, goes_on)


WORKLOADS: dict[str, Callable[[Random, int], list[Turn]]] = {
    "few-shot": few_shot,
    "chats, thinking stripped": chats,
    "chats, nothing stripped": whole_chats,
    "documents": documents,
    "agents": agents,
}
FULL_COUNTS = {  # conversations of each, or documents, in a full run
    "few-shot": 300,
    "chats, thinking stripped": 120,
    "chats, nothing stripped": 120,
    "documents": 40,
    "agents": 12,
}


def _interleaved(
    random: Random,
    prompts: list[Tokens],
    turns: int,
    goes_on: Callable[[Tokens], tuple[Tokens, Tokens]],
) -> list[Turn]:
    """Return the turns of conversations that begin so; any that has not ended is the next to speak."""
    left, made = dict.fromkeys(range(len(prompts)), turns), []
    while left:
        number = int(random.choice(list(left)))
        answer, following = goes_on(prompts[number])
        made.append(Turn(number, prompts[number], answer))
        prompts[number] = following
        left[number] -= 1
        if not left[number]:
            del left[number]
    return made


def _joined(*texts: Tokens) -> Tokens:
    return np.concatenate(texts)
