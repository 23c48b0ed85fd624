"""A prompt's page keys are computed where text becomes tokens, and never on the engine's thread."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from kv_cache import page_keys as page_keys_module
from kv_cache.page_keys import adapter_of, page_keys, page_salt
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from serving.answers.jobs import Job, JobRun
from serving.api.api_keys import ApiKeys, Rights
from serving.async_llm import AsyncLLM
from serving.engine.facts import facts_of
from serving.engine.messages import Add, encode
from serving.engine.worker import Worker
from tests.serving.conftest import Sockets
from tests.serving.server import TINY

SETTINGS = ["scheduler.num_slots=2", "device.threads=1", "device.compile=false"]
PROMPT = np.arange(300, 400, dtype=np.int32)


class Served:
    """An engine behind a socket, and how many hashes it has made."""

    def __init__(self, built: BuiltEngine, sockets: Sockets) -> None:
        self.engine = built.engine
        ours, self._theirs = sockets
        self.facts = facts_of(built, prefix_sharing=True)
        self._worker = Worker(self.engine, ours, self.facts)
        self._num_added = 0

    def add(self, keys: list[bytes], salt: str = "") -> Request:
        """A request with these keys, which is in the engine."""
        name, self._num_added = str(self._num_added), self._num_added + 1
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        message = Add(
            self._num_added, [name], PROMPT.tobytes(), b"".join(keys), params, [None], "", salt, 0, None, 0.0
        )
        self._theirs.send(encode(message))
        self._worker._take(1000)
        return self._worker._requests[self._num_added]

    def finish(self) -> None:
        """Run it to its end."""
        while self.engine.has_work:
            self.engine.step()


@pytest.fixture
def served(sockets: Sockets) -> Served:
    return Served(build(load(TINY, SETTINGS)), sockets)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed to name pages, from now on."""
    made: list[bytes] = []

    def sha256(data: bytes) -> Any:
        made.append(bytes(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(page_keys_module, "hashlib", SimpleNamespace(sha256=sha256))
    return made


def test_an_engine_that_gets_the_keys_hashes_nothing_of_a_prompt(served: Served, hashes: list[bytes]) -> None:
    keys = page_keys(PROMPT, served.facts.page_size, "")
    hashes.clear()
    request = served.add(keys)
    while request.first_token_s is None:
        served.engine.step()
    assert not hashes
    assert request.page_keys == keys


def test_an_engine_that_gets_no_keys_makes_the_same(served: Served, hashes: list[bytes]) -> None:
    request = served.add([])
    assert len(hashes) > len(PROMPT) // served.facts.page_size
    assert request.page_keys == page_keys(PROMPT, served.facts.page_size, "")


def test_keys_of_another_salt_find_no_page(served: Served) -> None:
    """Even if they came to the engine: a hit compares tokens and salt."""
    keys = page_keys(PROMPT, served.facts.page_size, "a")
    for salt in ("a", "a", "b"):
        request = served.add(keys, salt)
        served.finish()
        found = request.num_cached_tokens
        assert (found > 0) == (request.id == "1"), request.id


def test_the_server_makes_the_keys_that_the_engine_would(served: Served) -> None:
    async def keys_of(**fields: Any) -> list[bytes]:
        llm = AsyncLLM(TINY, *SETTINGS)
        facts = replace_facts(served, **fields)
        asked = {"id": "a", "prompt_token_ids": PROMPT.tolist(), "cache_salt": "mine", "n": 2}
        request = llm._parse(asked, facts, fill=False, shorten=False).request
        assert all(not each.page_keys for each in request.followers)  # they are sent once
        await llm.close()
        return request.page_keys

    request = Request("a", PROMPT, cache_salt=page_salt("mine"))
    assert asyncio.run(keys_of()) == served.engine.scheduler.page_keys(request) != []
    assert asyncio.run(keys_of(max_shared_tokens=len(PROMPT))) != []
    assert asyncio.run(keys_of(max_shared_tokens=len(PROMPT) - 1)) == []
    assert asyncio.run(keys_of(prefix_sharing=False)) == []


def replace_facts(served: Served, **fields: Any) -> Any:
    return msgspec.structs.replace(served.facts, **fields)


def test_a_program_has_its_keys_before_the_first_step(served: Served, hashes: list[bytes]) -> None:
    request = Request("a", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    run = JobRun(served.engine, None, [Job(request)])
    made = len(hashes)
    assert made > len(PROMPT) // served.facts.page_size
    list(run.answers(lambda step: hashes.append(b"step")))
    assert hashes[made] == b"step", "something was hashed before the first step had ended"


def test_each_key_of_the_server_has_a_salt_that_no_request_can_choose() -> None:
    """A client's own salt is hashed behind its key's: so none can come to another's pages."""
    keys = ApiKeys({"one": Rights(), "two": Rights()})
    one, two = keys.client("Bearer one"), keys.client("Bearer two")
    assert one is not None
    assert two is not None
    chosen = one.salted("x").partition(":")[2]
    for guess in ("", "x", chosen, one.salt, one.salted("x")):
        assert two.salted(guess) != one.salted("x")


def test_no_salt_of_a_request_is_that_of_an_adapter() -> None:
    """Whatever a client writes, and however long it is, it comes to no pages but those of its own salt."""
    digest = hashlib.sha256(b"files").hexdigest()
    adapters = {page_salt(own, digest): own for own in ("", "x")}
    assert len(adapters) == 2
    assert {adapter_of(each) for each in adapters} == {digest}
    written = ["", "x", ":", digest, f"{digest}:", f":adapter:{digest}", *adapters, "x" * 1024]
    salts = [page_salt(each) for each in written]
    assert len({*salts, *adapters}) == len({*written}) + len(adapters)
    assert page_salt("") == ""
    assert not any(map(adapter_of, salts))
    assert max(map(len, [*salts, *adapters])) <= 2 * 64 + 1
