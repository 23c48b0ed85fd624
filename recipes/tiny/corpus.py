"""Generate the corpus of the tiny model.

Three kinds of documents are drawn from a seed: bare sums ("348+275=623"), plain sentences in English and
Chinese, and chats whose turns ask for a sum, a count, or a few sentences about a thing. One sum in ten is
held out: `held_out` decides by a hash of the two operands, so no document ever contains it, in either order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator

from recipes.tiny.topics import GREETINGS, ITEMS, NAMES, SYSTEM_PROMPT, SYSTEM_PROMPTS, TOPICS, ZH_NAMES

BOS, EOS = "<s>", "</s>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Message = dict[str, str]
Turn = tuple[str, str]  # a question and its answer
Document = list[tuple[str, bool]]  # pieces of text; True: the model learns to write this piece


def held_out(a: int, b: int) -> bool:
    """Return whether the sum of `a` and `b` is kept from training.

    The rule is symmetric, and true for one pair in ten.
    """
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _operand(rng: random.Random) -> int:
    digits = rng.choices((1, 2, 3), weights=(15, 30, 55))[0]
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def draw_sum(rng: random.Random, *, test: bool = False, carries: float = 0.0) -> tuple[int, int]:
    """Draw two operands from 0 to 999, from the held-out sums if `test`, else from the others.

    `carries` is the share of pairs whose digits mostly add up to 9 or 10, where a carry runs through several
    places: that is rare in random draws, and the last thing a model learns.
    """
    while True:
        a, b = _operand(rng), _operand(rng)
        if rng.random() < carries:
            places = [max(0, 9 - a // 10**i % 10 + rng.choice((0, 0, 0, 1, -1))) for i in range(3)]
            b = sum(10**i * digit for i, digit in enumerate(places)) % 1000
            if rng.random() < 0.5:
                a, b = b, a
        if held_out(a, b) == test:
            return a, b


def _sum_turn(rng: random.Random, a: int, b: int) -> Turn:
    answer = f"{a}+{b}={a + b}"
    return rng.choice(
        (
            (f"What is {a}+{b}?", f"{answer}."),
            (f"What is {a} plus {b}?", f"{answer}."),
            (f"Please add {a} and {b}.", f"{answer}."),
            (f"{a}+{b}=?", f"{answer}."),
            (f"{a}+{b}", f"{answer}."),
            (f"{a}加{b}等于多少？", f"{answer}。"),
            (f"请计算{a}+{b}。", f"{answer}。"),
        )
    )


def _story_sum_turn(rng: random.Random, a: int, b: int) -> Turn:
    item, zh_item = rng.choice(ITEMS)
    if rng.random() < 0.6:
        name = rng.choice(NAMES)
        question = f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?"
        return question, f"{a}+{b}={a + b}, so {name} has {a + b} {item} now."
    name = rng.choice(ZH_NAMES)
    question = f"{name}有{a}{zh_item}，又得到{b}{zh_item}。{name}现在有多少{zh_item}？"
    return question, f"{a}+{b}={a + b}，所以{name}现在有{a + b}{zh_item}。"


def _count_turn(rng: random.Random) -> Turn:
    start, stop = sorted(rng.sample(range(10), 2))
    numbers = [str(number) for number in range(start, stop + 1)]
    if rng.random() < 0.3:
        numbers.reverse()
    if rng.random() < 0.6:
        return f"Count from {numbers[0]} to {numbers[-1]}.", ", ".join(numbers) + "."
    return f"从{numbers[0]}数到{numbers[-1]}。", "、".join(numbers) + "。"


def _topic_turn(rng: random.Random) -> Turn:
    topic = rng.choice(TOPICS)
    first, second, third = (
        f"The {topic.name} is {topic.look}.",
        f"You can find the {topic.name} {topic.place}.",
        f"It {topic.habit}.",
    )
    zh_first, zh_second, zh_third = (
        f"{topic.zh_name}{topic.zh_look}。",
        f"在{topic.zh_place}可以看到{topic.zh_name}。",
        f"{topic.zh_name}{topic.zh_habit}。",
    )
    return rng.choice(
        (
            (f"Tell me about the {topic.name}.", f"{first} {second} {third}"),
            (f"How does the {topic.name} look?", first),
            (f"Where can I find the {topic.name}?", second),
            (f"What does the {topic.name} do?", f"The {topic.name} {topic.habit}."),
            (f"请介绍一下{topic.zh_name}。", f"{zh_first}{zh_second}{zh_third}"),
            (f"{topic.zh_name}是什么样子的？", zh_first),
            (f"在哪里可以看到{topic.zh_name}？", zh_second),
            (f"{topic.zh_name}会做什么？", zh_third),
        )
    )


def _story_turn(rng: random.Random) -> Turn:
    topic = rng.choice(TOPICS)
    if rng.random() < 0.5:
        name = rng.choice(NAMES)
        return (
            f"Write a short story about {name} and the {topic.name}.",
            f"One day {name} saw the {topic.name} {topic.place}. It was {topic.look}. "
            f'"Hello!" said {name}. {name} learned that the {topic.name} {topic.habit}. '
            f"In the evening {name} went home and was happy.",
        )
    name = rng.choice(ZH_NAMES)
    return (
        f"请写一个{name}和{topic.zh_name}的小故事。",
        f"有一天，{name}在{topic.zh_place}看到了{topic.zh_name}。“你好！”{name}说。"
        f"{name}知道了，{topic.zh_name}{topic.zh_habit}。晚上，{name}高兴地回家了。",
    )


_OTHER_TURNS: tuple[Callable[[random.Random], Turn], ...] = (_topic_turn, _story_turn, _count_turn)


def _turn(rng: random.Random, *, test: bool, carries: float = 0.0) -> Turn:
    kind = rng.random()
    if kind < 0.02 and not test:
        return rng.choice(GREETINGS)
    if kind < 0.35:
        return rng.choice(_OTHER_TURNS)(rng)
    ask = _sum_turn if kind < 0.78 else _story_sum_turn
    return ask(rng, *draw_sum(rng, test=test, carries=carries))


def bare_sum(rng: random.Random, carries: float) -> Document:
    """Make a document of one sum; its operands are random, so only the answer is learned."""
    a, b = draw_sum(rng, carries=carries)
    return [(f"{BOS}{a}+{b}=", False), (f"{a + b}{EOS}", True)]


def sentence(rng: random.Random) -> Document:
    """Make a document of what an answer says, without its question."""
    return [(BOS, False), (rng.choice(_OTHER_TURNS)(rng)[1] + EOS, True)]


def chat(rng: random.Random, num_turns: int, prompted: float, carries: float) -> Document:
    """Make a dialogue in the chat template, in which the answers are learned.

    It has a system prompt with probability `prompted`.
    """
    document: Document = [(BOS, False)]
    if rng.random() < prompted:
        document.append((SYSTEM + rng.choice((SYSTEM_PROMPT, rng.choice(SYSTEM_PROMPTS))), False))
    for _ in range(num_turns):
        question, answer = _turn(rng, test=False, carries=carries)
        document += [(USER + question + ASSISTANT, False), (answer + EOS, True)]
    return document


def documents(seed: int, *, long: bool) -> Iterator[Document]:
    """Yield the corpus, without end.

    If `long`, chats have many turns, and most a system prompt; otherwise they have one turn.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < (0.45 if long else 0.62):
            yield bare_sum(rng, carries=0.3)
        elif kind < (0.47 if long else 0.65):
            yield sentence(rng)
        else:
            yield chat(rng, rng.randint(1, 12) if long else 1, prompted=0.6 if long else 0.05, carries=0.3)


def held_out_sums(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return `count` different sums that no document contains, of one to three digits each."""
    rng = random.Random(seed)
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[draw_sum(rng, test=True)] = None
    return list(found)


def messages(question: str, system: str | None = SYSTEM_PROMPT) -> list[Message]:
    """Return a chat of one question, under `system` unless it is None."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]


def demo_requests(count: int, seed: int = 0) -> list[list[Message]]:
    """Return `count` chats that share one system prompt: held-out sums, counts, and questions about things.

    Answers have from about 8 to about 70 tokens.
    """
    rng = random.Random(seed)
    return [messages(_turn(rng, test=True)[0]) for _ in range(count)]
