"""Generate the corpus of the tiny agent.

The documents are conversations with two tools, `add(a, b)` and `price(item)`, in which the agent thinks,
calls, reads results and answers, in words or in JSON. Numbers and prices are random, so that it has to call
for them and copy them. A document is a conversation up to one turn of the agent. That turn is learned, and of
earlier turns only the calls: earlier reasoning is not in the document, as the chat template leaves it out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.tiny.corpus import ASSISTANT, BOS, EOS, SYSTEM, USER, Document
from recipes.tiny.topics import SYSTEM_PROMPTS

TOOL = "<|tool|>"
THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools:"
    "{% for tool in tools %}\n{{ tool.function.name }}"
    "({{ ((tool.function.parameters or {}).properties or {}) | join(', ') }}){% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)

TOOLS = {"add": ("a", "b"), "price": ("item",)}
ITEMS = (
    *("apple", "book", "chair", "clock", "coat", "cup", "drum", "fork", "hat", "kite", "lamp", "map"),
    *(
        "mirror",
        "pear",
        "pencil",
        "piano",
        "plate",
        "radio",
        "ring",
        "rope",
        "ship",
        "spoon",
        "table",
        "tent",
    ),
)
NO_TOOL = "I have no tool for this."
HELLO = "Hello! Ask me for a sum or a price."
_JSON = " Answer in JSON."
_PROMPTS = [each for each in SYSTEM_PROMPTS if each.isascii()]


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn of the agent: its reasoning, then calls or an answer; `results` are those of its calls."""

    thought: str
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    answer: str = ""

    @property
    def said(self) -> str:
        """Everything but the reasoning."""
        return self.answer or "\n".join(f"{CALL}\n{each}\n{CALLED}" for each in self.calls)


Exchange = tuple[str, list[AgentTurn]]  # a question, and the turns up to its answer


def _call(name: str, *values: int | str) -> str:
    arguments = dict(zip(TOOLS[name], values))
    return f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'


def _result(rng: random.Random, name: str, value: int) -> str:
    return str(value) if rng.random() < 0.5 else json.dumps({name: value})


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 3))


def _answer(rng: random.Random, question: str, words: str, **values: int | str) -> tuple[str, str]:
    """Return the question, with its answer in words, or in JSON where it asks for that."""
    return (question, words) if rng.random() < 0.6 else (question + _JSON, json.dumps(values))


def _sum(rng: random.Random) -> Exchange:
    a, b = _number(rng), _number(rng)
    asked = rng.choice(
        (f"What is {a}+{b}?", f"What is {a} plus {b}?", f"Please add {a} and {b}.", f"{a}+{b}")
    )
    question, answer = _answer(rng, asked, f"{a}+{b}={a + b}.", sum=a + b)
    call, result = _call("add", a, b), _result(rng, "sum", a + b)
    return question, [
        AgentTurn(f"I add {a} and {b}.", (call,), (result,)),
        AgentTurn(f"The sum is {a + b}.", answer=answer),
    ]


def _price(rng: random.Random) -> Exchange:
    item, price = rng.choice(ITEMS), _number(rng)
    asked = rng.choice(
        (f"What does the {item} cost?", f"How much is the {item}?", f"Tell me the price of the {item}.")
    )
    question, answer = _answer(rng, asked, f"The {item} costs {price}.", item=item, price=price)
    call, result = _call("price", item), _result(rng, "price", price)
    return question, [
        AgentTurn(f"I look up the {item}.", (call,), (result,)),
        AgentTurn(f"The price is {price}.", answer=answer),
    ]


def _total(rng: random.Random) -> Exchange:
    """Make a question about two prices and their sum.

    In some documents one price is looked up after the other, as where a request allows one call at a time.
    """
    (one, other), (p, q) = rng.sample(ITEMS, 2), (_number(rng), _number(rng))
    asked = rng.choice(
        (
            f"What do the {one} and the {other} cost together?",
            f"How much are the {one} and the {other}?",
            f"Add the prices of the {one} and the {other}.",
        )
    )
    answer = f"The {one} and the {other} cost {p + q} together."
    question, answer = _answer(rng, asked, answer, total=p + q)
    calls = (_call("price", one), _call("price", other))
    results = (_result(rng, "price", p), _result(rng, "price", q))
    plan = f"I look up the {one} and the {other}, then I add."
    turns = [AgentTurn(plan, calls, results)]
    if rng.random() < 0.3:
        then = AgentTurn(f"Now the {other}.", calls[1:], results[1:])
        turns = [AgentTurn(plan, calls[:1], results[:1]), then]
    add, total = _call("add", p, q), _result(rng, "sum", p + q)
    return question, [
        *turns,
        AgentTurn(f"Now I add {p} and {q}.", (add,), (total,)),
        AgentTurn(f"The sum is {p + q}.", answer=answer),
    ]


def _needs(exchange: Exchange) -> set[str]:
    return {json.loads(call)["name"] for turn in exchange[1] for call in turn.calls}


def _exchange(rng: random.Random, tools: list[str]) -> Exchange:
    """Make a question that the tools can answer; one that they cannot is refused."""
    if rng.random() < 0.05:
        greeting = rng.choice(("Hello", "Hi", "Hello!", "Good morning."))
        return greeting, [AgentTurn("I need no tool.", answer=HELLO)]
    question, turns = exchange = rng.choice((_sum, _price, _total, _total))(rng)
    if _needs(exchange) <= {*tools}:
        return question, turns
    return question, [AgentTurn(NO_TOOL, answer=NO_TOOL)]


def _history(question: str, turns: list[AgentTurn]) -> Document:
    """Return the pieces of earlier turns, in which only calls are learned, from after their mark on."""
    pieces = [(USER + question, False)]
    for turn in turns:
        begun = CALL if turn.calls else turn.said
        pieces += [(ASSISTANT + begun, False), (turn.said.removeprefix(begun), True), (EOS, False)]
        pieces += [(TOOL + each, False) for each in turn.results]
    return pieces


def documents(seed: int, *, long: bool) -> Iterator[Document]:
    """Yield the corpus, without end; if `long`, up to two questions come before the last one."""
    rng = random.Random(seed)
    while True:
        tools = [*TOOLS] if rng.random() < 0.85 else rng.choice(([], ["add"], ["price"]))
        rng.shuffle(tools)
        document: Document = [(BOS, False)]
        if tools:
            named = "".join(f"\n{each}({', '.join(TOOLS[each])})" for each in tools)
            document.append((f"{SYSTEM}Tools:{named}", False))
        if rng.random() < 0.1:
            document.append((SYSTEM + rng.choice(_PROMPTS), False))
        for _ in range(rng.randrange(3) if long else 0):
            document += _history(*_exchange(rng, tools))
        question, turns = _exchange(rng, tools)
        # Whether prices are asked for at once is random, so the agent must not learn to ask for one alone.
        first = 1 if len(turns) > 3 else 0
        at = rng.randrange(first, len(turns))
        turn = turns[at]
        thought = f"{THINK}\n{turn.thought}\n{THOUGHT}\n"
        unlearned = ""
        if rng.random() < 0.1:  # corresponds to enable_thinking: false
            thought, unlearned = "", f"{THINK}\n\n{THOUGHT}\n"
        document += [*_history(question, turns[:at]), (ASSISTANT + unlearned, False)]
        yield [*document, (thought + turn.said + EOS, True)]
