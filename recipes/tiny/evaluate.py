"""Measure how many held-out sums the tiny model gets right, and how many turns the tiny agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from recipes.tiny import agent_corpus
from recipes.tiny.corpus import BOS, EOS, held_out_sums, messages


def answers(directory: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32) -> list[list[int]]:
    """Return greedy continuations of token ids, by transformers in float32; equal lengths run together."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_length[len(prompt)].append(number)
    found: dict[int, list[int]] = {}
    for length, numbers in by_length.items():
        ids = torch.tensor([list(prompts[number]) for number in numbers])
        # transformers' annotation asks for a protocol that its own models do not meet
        output = model.generate(  # type: ignore[misc]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        found.update(zip(numbers, output[:, length:].tolist()))
    return [found[number] for number in range(len(prompts))]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Return the token ids of a conversation that begins with this question."""
    # Annotated with every form that other arguments give; with these it is a list of ids
    ids: Any = tokenizer.apply_chat_template(
        messages(question), add_generation_prompt=True, return_dict=False
    )
    return list(ids)


def accuracy(directory: Path, count: int, *, chat: bool, seed: int = 0) -> float:
    """Return the fraction of `count` held-out sums that are answered right.

    If `chat`, they are asked under the system prompt.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sums = held_out_sums(count, seed)
    if chat:
        prompts = [chat_prompt(tokenizer, f"What is {a}+{b}?") for a, b in sums]
        expected = [f"{a}+{b}={a + b}." for a, b in sums]
    else:
        prompts = [tokenizer.encode(f"{a}+{b}=") for a, b in sums]
        expected = [str(a + b) for a, b in sums]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers(directory, prompts)]
    return sum(text == right for text, right in zip(texts, expected)) / count


def report(directory: Path, count: int = 1000) -> str:
    """Return one line about the model for people to read."""
    bare, chat = accuracy(directory, count, chat=False), accuracy(directory, count, chat=True)
    return f"held-out sums right of {count}: bare {bare:.1%}, in a chat {chat:.1%}"


def turns_right(directory: Path, count: int, *, long: bool, seed: int = 10**6) -> float:
    """Return the fraction of `count` turns that the agent writes as the corpus has them.

    The reasoning must be equal, too.

    Nearly all of their numbers occur in no document that it has read.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = list(islice(agent_corpus.documents(seed, long=long), count))
    documents = [[text for text, _ in document] for document in asked]
    prompts = [tokenizer.encode("".join(each[:-1]).removeprefix(BOS)) for each in documents]
    expected = [each[-1].removesuffix(EOS) for each in documents]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers(directory, prompts, 120)]
    return sum(text == right for text, right in zip(texts, expected)) / count


def agent_report(directory: Path, count: int = 500) -> str:
    """Return one line about the agent for people to read."""
    short, long = (turns_right(directory, count, long=long) for long in (False, True))
    return f"turns right of {count}: after one question {short:.1%}, after several {long:.1%}"
