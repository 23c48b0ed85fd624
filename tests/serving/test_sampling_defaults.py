"""A checkpoint's generation_config.json fills the fields that a request leaves out, as in generate."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from borders.refusal import BadRequest
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from serving.llm import LLM, SamplingParams
from serving.offline import read_jobs, run_jobs
from serving.text.request_fields import parse_request
from serving.text.sampling_defaults import sampling_defaults
from tests.lazy import transformers
from tests.models.families import VARIANTS, make
from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.thorough import cases, first_quick

RECIPE = "recipes/any/cpu.yaml"
SMALL = ("cache.memory_gib=0.05", "device.compile=false", "device.threads=1")
VARIANT = replace(next(each for each in VARIANTS if each.name == "llama"), saved_as=torch.float32)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(VARIANT, tmp_path_factory.mktemp("made"))[1]


def say(folder: Path, said: dict[str, Any] | None, name: str = "generation_config.json") -> None:
    if said is None:
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / name).write_text(json.dumps(said))


def generated(folder: Path, seed: int) -> list[int]:
    """What transformers' generate draws of its own accord."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": 8, "pad_token_id": 0, "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    found: list[int] = model.generate(torch.tensor([PROMPT]), **options)[0, 3:].tolist()
    return found


def recipe(folder: Path, *more: str) -> Recipe:
    return load(RECIPE, (f"model.path={folder}", *SMALL, *more))


def drawn(folder: Path, seeds: tuple[int, ...], *more: str) -> list[list[int]]:
    """What this engine draws for requests that name no sampling field."""
    asked = recipe(folder, *more)
    given = {"prompt_token_ids": PROMPT, "max_tokens": 8, "ignore_eos": True}
    lines = [json.dumps({"id": str(seed), "seed": seed, **given}) for seed in seeds]
    records = run_jobs(build(asked).engine, None, read_jobs(lines, None, asked))
    return [each["token_ids"] for each in records]


SETTINGS: list[dict[str, Any]] = [
    {"do_sample": True, "top_k": 1, "repetition_penalty": 1.7},
    {"do_sample": True, "top_p": 1e-4},
    {"do_sample": False, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "min_p": 1.0},
    {"do_sample": True, "top_k": 1, "temperature": 0.6},
    {"do_sample": True, "top_k": None, "temperature": 1e-4},
    {"do_sample": False, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("said", first_quick(2, cases(SETTINGS[:4], SETTINGS)), ids=str)
def test_requests_that_name_no_field_are_sampled_as_generate_samples(
    said: dict[str, Any], checkpoint: Path
) -> None:
    say(checkpoint, said)
    right = generated(checkpoint, 1)
    assert generated(checkpoint, 2) == right, "these settings leave no choice"
    assert drawn(checkpoint, (1, 2)) == [right, right]


def test_config_json_counts_where_older_versions_wrote_defaults_there(checkpoint: Path) -> None:
    say(checkpoint, None)
    hf = json.loads((checkpoint / "config.json").read_text())
    try:
        say(checkpoint, hf | {"do_sample": True, "top_k": 1, "repetition_penalty": 1.7}, "config.json")
        assert sampling_defaults(recipe(checkpoint)) == {"top_k": 1, "repetition_penalty": 1.7}
        unsaid = {"do_sample": False, "top_k": 50, "temperature": 1.0, "top_p": 1.0, "num_beams": 1}
        say(checkpoint, hf | unsaid, "config.json")
        assert sampling_defaults(recipe(checkpoint)) == {}
    finally:
        say(checkpoint, hf, "config.json")


def test_one_key_of_the_recipe_switches_them_off(checkpoint: Path) -> None:
    say(checkpoint, {"do_sample": True, "top_k": 1, "max_new_tokens": 5})
    assert sampling_defaults(recipe(checkpoint)) == {"top_k": 1, "max_tokens": 5}
    assert sampling_defaults(recipe(checkpoint, "model.generation_config=none")) == {}


def test_a_request_goes_before_the_file() -> None:
    defaults = {"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.2, "max_tokens": 5}
    asked = {"id": "a", "prompt_token_ids": PROMPT}

    def read(**fields: Any) -> Any:
        return parse_request(asked | fields, None, longest=50, defaults=defaults).params

    plain = read()
    assert (plain.temperature, plain.top_k, plain.repetition_penalty, plain.max_tokens) == (0.3, 7, 1.2, 5)
    own = read(temperature=0, top_k=0, max_tokens=9, repetition_penalty=None)
    assert (own.temperature, own.top_k, own.repetition_penalty, own.max_tokens) == (0, 0, 1.2, 9)
    beams = read(beam_width=3)
    assert (beams.temperature, beams.top_k, beams.repetition_penalty) == (1.0, 0, 1.2)
    pooled = read(pooling="last")
    assert (pooled.temperature, pooled.top_k, pooled.repetition_penalty) == (0, 0, 1.0)
    assert parse_request(asked, None, defaults=defaults).params.max_tokens == 16
    with pytest.raises(BadRequest, match="top_k"):
        read(top_k=-7)


def test_python_takes_them_where_it_gives_no_parameters(checkpoint: Path) -> None:
    say(checkpoint, {"do_sample": True, "top_k": 1, "max_new_tokens": 9})
    llm = LLM(RECIPE, f"model.path={checkpoint}", *SMALL)
    prompts = [{"prompt_token_ids": PROMPT}] * 2
    one, two = (each.outputs[0].token_ids for each in llm.generate(prompts, use_tqdm=False))
    assert one == two
    assert one[:8] == generated(checkpoint, 1)
    given = llm.generate(prompts * 4, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len({tuple(each.outputs[0].token_ids) for each in given}) > 1, "given parameters count as a whole"
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    (whole,) = llm.generate(prompts[:1], endless, use_tqdm=False)
    assert len(whole.outputs[0].token_ids) > 9


def test_what_no_request_could_have_is_refused_and_what_is_not_counted_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say(checkpoint, {"top_p": 7})
    with pytest.raises(
        ValueError, match=r"generation_config.json has top_p: 7; .*model.generation_config: none"
    ):
        sampling_defaults(recipe(checkpoint))
    say(checkpoint, {"num_beams": 4, "no_repeat_ngram_size": 0, "suppress_tokens": [3], "typical_p": 1.0})
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(recipe(checkpoint)) == {}
    assert "no default of requests is num_beams, suppress_tokens" in caplog.text
    say(checkpoint, None)


@pytest.mark.slow
def test_a_server_counts_them_and_says_so(checkpoint: Path) -> None:
    say(checkpoint, {"do_sample": True, "top_k": 1, "max_new_tokens": 8})
    server = Server(RECIPE, f"model.path={checkpoint}", *SMALL).ready()
    try:
        info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
        assert info["sampling_defaults"] == {"top_k": 1, "max_tokens": 8}
        asked = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answers = [
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).json() for _ in "ab"
        ]
        one, two = (each["choices"][0]["token_ids"] for each in answers)
        assert one == two == generated(checkpoint, 1)
    finally:
        server.close()
