"""Masks, biases and grammars hold where steps are compiled, captured or computed by an NPU."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.constraints import Constraint, Mask
from continuous_batching.request import Request, SamplingParams, packed_ids
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import has_npu, settings

NPU = [pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")]
WAYS = {
    "cpu": ["device.compile=false", "device.threads=1"],
    "cpu, compiled": ["device.compile=true", "device.threads=1"],
    "npu": [*settings("npu"), "device.graphs=0"],
    "npu, captured": [*settings("npu"), "device.graphs=6"],
}
ALLOWED = list(range(300, 340))
LIKED, DISLIKED = 77, 301
# Words of which each ends in a token that the bias makes the likeliest, so that without masks it is chosen
WORDS = ((320,), (DISLIKED, DISLIKED), (302, 303))


def asked() -> list[Request]:
    """Masks, biases, both and neither beside one another, drawn and not."""
    random = np.random.default_rng(5)
    kinds = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, allowed_token_ids=packed_ids(ALLOWED)),
        SamplingParams(
            max_tokens=12, temperature=0, ignore_eos=True, logit_bias={DISLIKED: 100.0}, bad_words=WORDS
        ),
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(
            max_tokens=12, temperature=1, seed=3, ignore_eos=True, allowed_token_ids=packed_ids(ALLOWED),
            bad_words=WORDS, logit_bias={LIKED: 100.0, DISLIKED: 100.0},
        ),
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logit_bias={LIKED: 100.0}),
    ]  # fmt: skip
    return [
        Request(str(number), random.integers(3, 300, 5 + 9 * number), params)
        for number, params in enumerate(kinds)
    ]


def holds(answer: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(answer[at : at + len(word)]) == word for at in range(len(answer)))


MARKS = {"cpu": [], "cpu, compiled": [pytest.mark.slow], "npu": NPU, "npu, captured": NPU}


class Staircase:
    """Lets nothing but 415, 416, ... come, and the end behind 419."""

    error = ""

    def __init__(self) -> None:
        self.num_tokens = 0

    def mask(self) -> Mask:
        mask = np.zeros(32, dtype=np.int32)
        token = (
            2 if self.num_tokens == 5 else 415 + self.num_tokens
        )  # the highest bit of a word is among them
        mask[token // 32] = np.array([1 << token % 32], dtype=np.uint32).view(np.int32)[0]
        return mask

    def consume(self, token: int) -> bool:
        self.num_tokens += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    def num_possible(self, tokens: list[int]) -> int:
        return 0

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize("way", [pytest.param(each, marks=MARKS[each]) for each in WAYS])
def test_masks_biases_and_grammars_hold(way: str) -> None:
    few = ["cache.num_pages=64", "scheduler.num_slots=6", "scheduler.max_batch_tokens=48"]
    engine = build(load(ROOT / "recipes/tiny/cpu.yaml", [*WAYS[way], *few])).engine
    made, stairs = asked(), []
    for temperature in (0, 1.5):
        params = SamplingParams(max_tokens=12, temperature=temperature, grammar="a staircase", min_tokens=3)
        prompt = np.arange(3, 20)
        stairs.append(Request(f"stairs {temperature}", prompt, params, constraint=Constraint(Staircase)))
    for request in (*made, *stairs):
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert [request.finish_reason for request in made] == ["length"] * 5, [each.error for each in made]
    allowed, words, plain, both, liked = (request.answer.tolist() for request in made)
    assert set(allowed) <= set(ALLOWED)
    assert set(both) <= set(ALLOWED)
    assert liked == [LIKED] * 12
    assert DISLIKED in words, "its bias makes it the likeliest wherever no word ends with it"
    assert DISLIKED in both
    for word in WORDS:
        assert not holds(words, word)
        assert not holds(both, word)
    assert set(plain).isdisjoint([LIKED, DISLIKED]), "what neighbours ask for does not reach it"
    assert [request.answer.tolist() for request in stairs] == [[415, 416, 417, 418, 419, 2]] * 2
    assert [request.finish_reason for request in stairs] == ["stop"] * 2
