"""Clients get answers of the adapter that they name, while adapters come, go, and outlive an engine.

The judge is transformers with peft's adapters merged into its weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from msgspec.structs import replace

from continuous_batching.request import Request
from kv_cache.page_keys import page_salt
from recipes.schema.adapters_section import AdaptersSection
from recipes.schema.recipe import ROOT
from serving import adapters as of_adapters
from serving.adapters import AdapterPut, PutAdapter, ServedAdapters
from serving.continuation import PATH, encode
from serving.failures import Unavailable
from serving.llm import LLM, SamplingParams
from serving.roots import Root
from serving.text.tokenizer import Text
from tests.lazy import openai, transformers
from tests.models.test_adapters import adapted
from tests.patience import PATIENCE_S
from tests.serving import test_continuations, test_own_processors
from tests.serving.server import TINY, Server
from tests.serving.test_lost_ranks import followers

WEIGHTS = ROOT / "recipes/tiny/weights"
PROMPTS = ["348+275=", "One day, a fox", "Ben has 506 books and gets 3 more."]
ROOM = ("adapters.most=2", "adapters.rank=8")
NUM_NEW = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters called one, two and three."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        models()[name] = adapted(models()["tiny"], root / name, seed, r=2 + seed)
    return root


@cache
def models() -> dict[str, Any]:
    """transformers' models by the names that the server has for them."""
    return {"tiny": transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)}


def expected(name: str, prompt: str) -> list[int]:
    return told_by(models()[name], prompt)


@cache
def told_by(model: Any, prompt: str) -> list[int]:
    text = Text.load(WEIGHTS)
    assert text is not None
    tokens, found = text.encode(prompt), []
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            logits = model(torch.tensor([tokens + found])).logits
            found.append(int(logits[0, -1].argmax()))
    return found


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[Server]:
    server = Server(
        *(TINY, *ROOM, f"adapters.folders={{one: {folders / 'one'}}}", f"adapters.root={folders}"),
        *("model.dtype=float32", "scheduler.num_slots=8", "server.spare_engine=false"),
    ).ready()
    yield server
    assert server.close() == 0


def answers(served: Server, name: str) -> list[list[int]]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="any", max_retries=9, timeout=PATIENCE_S
    ) as client:
        found = [
            client.completions.create(
                model=name, prompt=prompt, max_tokens=NUM_NEW, temperature=0, logprobs=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for prompt in PROMPTS
        ]  # fmt: skip
        assert all(each.model == name for each in found)
        return [each.choices[0].token_ids for each in found]


def check(served: Server, *names: str) -> None:
    for name in names:
        assert answers(served, name) == [expected(name, prompt) for prompt in PROMPTS], name


def post(served: Server, verb: str, **body: str) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{verb}_lora_adapter", json=body, timeout=PATIENCE_S)


def refusal(served: Server, verb: str, **body: str) -> str:
    response = post(served, verb, **body)
    assert response.status_code == 400
    message: str = response.json()["error"]["message"]
    return message


def listed(served: Server) -> dict[str, str | None]:
    data = httpx.get(f"{served.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return {each["id"]: each.get("parent") for each in data}


def test_the_answer_of_an_adapter_goes_on_with_that_adapter_alone(served: Server, folders: Path) -> None:
    """Whatever it is called: the digest of its files must be the first replica's."""
    prompt = "Once upon a time"
    fields = {"model": "one", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    before = test_continuations.ask(served, "/v1/completions", fields | {"stream": True})
    assert before.begun.adapter
    assert test_continuations.go_on(served, before.until(3)).since(0) == before.since(3)
    other = json.dumps(fields | {"model": "tiny", "stream": True}).encode()
    sent = encode(replace(before.until(3), body=other))
    assert test_continuations.post(served, PATH, sent, test_continuations.ROUTER).status_code == 409


@pytest.mark.slow
def test_adapters_come_and_go_and_outlive_an_engine(served: Server, folders: Path) -> None:
    check(served, "tiny", "one")
    assert listed(served) == {"tiny": None, "one": "tiny"}
    assert post(served, "load", lora_name="deux", lora_path="two").text == (
        "Success: LoRA adapter 'deux' added successfully."
    )
    models()["deux"] = models()["two"]
    check(served, "tiny", "one", "deux")
    assert "all 2 are taken" in refusal(served, "load", lora_name="three", lora_path="three")
    os.kill(served.engine_pid, signal.SIGKILL)
    check(served, "deux", "one", "tiny")
    assert post(served, "unload", lora_name="deux").status_code == 200
    with pytest.raises(openai.NotFoundError, match="there is no model 'deux'"):
        answers(served, "deux")
    assert post(served, "load", lora_name="three", lora_path=str(folders / "three")).status_code == 200
    check(served, "three", "one", "tiny")
    assert post(served, "unload", lora_name="three").status_code == 200
    shutil.copytree(folders / "two", folders / "again")
    assert post(served, "load", lora_name="three", lora_path="again").status_code == 200
    models()["three"] = models()["two"]  # the same name, other files: no page of the old one is found
    check(served, "three")
    assert post(served, "unload", lora_name="three").status_code == 200


def test_what_cannot_be_loaded_is_refused_and_the_rest_goes_on(served: Server, folders: Path) -> None:
    damaged = folders / "damaged"
    shutil.copytree(folders / "two", damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"nothing")
    outside = folders.parent / "outside"
    outside.mkdir()
    for name, file in (("linked", "adapter_model.safetensors"), ("described", "adapter_config.json")):
        shutil.copytree(folders / "two", folders / name)
        (folders / name / file).replace(outside / file)
        (folders / name / file).symlink_to(outside / file)
    shutil.copytree(folders / "two", folders / "endless")
    config = folders / "endless" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 10**400}))
    (folders / "loop").symlink_to(folders / "loop")
    for name, path, why in (
        ("tiny", "two", "is the name of the model"),
        ("one", "two", "is loaded already; unload it first"),
        ("", "two", "must be of 1 to 256 characters"),
        ("more", "absent", "no such file or directory"),
        ("more", "../..", "leads out of adapters.root"),
        ("more", "/etc", "leads out of adapters.root"),
        ("more", "damaged", "cannot be read as safetensors"),
        ("more", "linked", "holds adapter_model.safetensors, a link that leads out of adapters.root"),
        ("more", "described", "holds adapter_config.json, a link that leads out of adapters.root"),
        ("more", "endless", "it must be a number from -1000000000 to 1000000000"),
        ("more", "loop", "lora_path "),
        ("more", "one/adapter_config.json", "lora_path "),
    ):
        found = refusal(served, "load", lora_name=name, lora_path=path)
        assert why in found, (name, path)
        assert str(folders.parent) not in found, "a client learns where the adapters lie"
    assert 'must be "one"' in refusal(served, "unload", lora_name="more")
    assert "is an adapter of the recipe" in refusal(served, "unload", lora_name="one")
    check(served, "one")


def test_programs_name_the_adapters_of_the_recipe(folders: Path) -> None:
    llm = LLM(TINY, *ROOM, f"adapters.folders={{one: {folders / 'one'}}}", "model.dtype=float32")
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    for name in ("one", "tiny"):
        own = {} if name == "tiny" else {"adapter": name}
        found = llm.generate([{"prompt": each, **own} for each in PROMPTS], params, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in found] == [expected(name, each) for each in PROMPTS]
    with pytest.raises(ValueError, match='adapter is "two"; it must be "one"'):
        llm.generate([{"prompt": "a", "adapter": "two"}], params, use_tqdm=False)


def test_a_refusal_names_no_path_above_the_root_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    for root, at in ((".", tmp_path), ("a", tmp_path / "a"), (tmp_path / "a", tmp_path / "a")):
        for text, told in (
            (f"no 'adapter_config.json' at {at}/x.", "no 'adapter_config.json' at x."),
            (f"{at}: 'a' is no folder, {at}.", "adapters.root: 'a' is no folder, adapters.root."),
            (f"{at}-b/c, {at}.d and /e{at}", f"{at}-b/c, {at}.d and /e{at}"),
        ):
            assert Root(Path(root), "adapters.root").hidden(text) == told
    assert Root(Path("/"), "adapters.root").hidden("/a/b: it is gone") == "/a/b: it is gone"


def test_an_adapter_is_not_asked_for_before_a_new_engine_has_it(folders: Path) -> None:
    sent: list[PutAdapter] = []
    adapters = ServedAdapters(AdaptersSection(most=1, rank=8, root=folders), sent.append, lambda: ())

    async def load() -> None:
        loading = asyncio.ensure_future(adapters.load("one", "one"))
        while not sent:
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="is being loaded"):
            adapters.find("one")
        adapters.hear(AdapterPut(sent[0].number, sent[0].digest, ""))
        await loading

    asyncio.run(load())
    request = Request("one", [1], adapter=1, cache_salt=page_salt("", adapters.find("one").files.digest))
    adapters.check(request)
    adapters.begin(())  # another engine's
    assert sent[1] == sent[0]
    for ask in (lambda: adapters.find("one"), lambda: adapters.check(request)):
        with pytest.raises(Unavailable):
            ask()
    adapters.hear(AdapterPut(1, sent[0].digest, "the file is gone"))
    assert not adapters.knows("one")


def test_pages_of_a_recipes_adapter_are_found_by_what_the_engine_has_read(folders: Path) -> None:
    """Its files may have changed before another engine starts; who asked before is refused then."""
    section = AdaptersSection(most=2, rank=8, folders={"one": str(folders / "one")})
    adapters = ServedAdapters(section, lambda _: None, lambda: ())
    before = adapters.find("one").files.digest
    asked = Request("one", [1], adapter=1, cache_salt=page_salt("", before))
    adapters.begin([before])
    adapters.check(asked)
    adapters.begin(["0" * len(before)])
    assert adapters.find("one").files.digest == "0" * len(before)
    with pytest.raises(Unavailable):
        adapters.check(asked)


@pytest.mark.parametrize("most", [1, 3])
def test_a_place_that_has_been_taken_while_files_were_read_is_not_given_to_another(
    most: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter comes there meanwhile and goes, and a request on it goes on."""
    sent: list[PutAdapter] = []
    running: list[Request] = []
    section = AdaptersSection(most=most, rank=8, root=folders)
    adapters = ServedAdapters(section, sent.append, lambda: iter(running))
    may_read, look_at = threading.Event(), of_adapters.look_at

    def slow(folder: Path, rank: int) -> Any:
        if folder.name == "two":
            assert may_read.wait(PATIENCE_S)
        return look_at(folder, rank)

    async def put(name: str) -> None:
        loading = asyncio.ensure_future(adapters.load(name, name))
        number = len(sent)
        while len(sent) == number and not loading.done():
            await asyncio.sleep(0.01)
        if len(sent) > number:
            adapters.hear(AdapterPut(sent[-1].number, sent[-1].digest, ""))
        await loading

    async def load() -> None:
        late = asyncio.ensure_future(adapters.load("two", "two"))
        await asyncio.sleep(0)
        await put("one")
        running.append(Request("runs", [1], adapter=adapters.find("one").number))
        adapters.unload("one")
        may_read.set()
        if most == 1:
            with pytest.raises(Unavailable, match="has taken"):
                await late
            return
        while len(sent) == 1:
            await asyncio.sleep(0.01)
        assert [each.number for each in sent] == [1, 2]
        adapters.hear(AdapterPut(2, sent[1].digest, ""))
        await late

    monkeypatch.setattr(of_adapters, "look_at", slow)
    asyncio.run(load())


def complete(served: Server, name: str, **fields: Any) -> httpx.Response:
    body = {"model": name, "prompt": PROMPTS[0], "max_tokens": NUM_NEW, "temperature": 0} | fields
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)


def bans(tokens: list[int]) -> list[dict[str, Any]]:
    """The fields that forbid tokens: by a processor, and by a bias."""
    shared = {"ignore_eos": True, "return_token_ids": True}
    ban = {"name": "Ban", "args": {"tokens": tokens}}
    return [
        shared | {"logits_processors": [ban]},
        shared | {"logit_bias": {str(token): -100 for token in tokens}},
    ]


@pytest.mark.slow
@pytest.mark.in_order
def test_all_ranks_load_an_adapter_while_they_serve_or_none_does(folders: Path) -> None:
    """Beside a processor of the operator's own, which acts on rank 0's rows of the whole vocabulary."""
    served = Server(
        *(TINY, *ROOM, f"adapters.root={folders}", "parallel.tensor=2", "server.step_timeout_s=300"),
        *("model.dtype=float32", "scheduler.num_slots=8", "server.spare_engine=false", "device.threads=1"),
        test_own_processors.CLASSES,
    ).ready()
    try:
        assert post(served, "load", lora_name="deux", lora_path="two").status_code == 200
        models().update(dict.fromkeys(("deux", "zwei"), models()["two"]))
        check(served, "tiny", "deux")
        said = [expected("deux", PROMPTS[0])[0], expected("tiny", PROMPTS[0])[0]]
        banned = [complete(served, "deux", **fields) for fields in bans(said)]
        assert banned[0].json()["choices"][0]["text"] == banned[1].json()["choices"][0]["text"]
        assert said[0] not in banned[0].json()["choices"][0]["token_ids"]
        (follower,) = followers(served.engine_pid)
        os.kill(follower, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            loaded = thread.submit(post, served, "load", lora_name="zwei", lora_path="two")
            until_s = time.monotonic() + PATIENCE_S
            while "is being loaded" not in complete(served, "zwei").text:
                assert time.monotonic() < until_s
            assert not loaded.done(), "a rank that is stopped has read its part"
            os.kill(follower, signal.SIGKILL)
            assert loaded.result(PATIENCE_S).status_code == 503
        check(served, "deux")  # which the next engine has loaded again
        assert post(served, "load", lora_name="zwei", lora_path="two").status_code == 200
        check(served, "zwei", "tiny")
    finally:
        assert served.close() == 0
