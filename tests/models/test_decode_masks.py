"""Decodes on an NPU have a mask until a probe has said that they are right without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devices.ascend_limits import answers_file, write_answers
from recipes import machine as machines
from recipes.machine import Npu, start
from tests.attention import test_latent
from tests.attention.test_attention import Bench, shape
from tests.device_kinds import has_npu, operators, section
from tests.models.test_npu import engine_of, serve

pytestmark = [pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")]

FUSED_ATTENTION = "npu_fused_infer_attention_score"
WINDOW = 24
# Layers with a window beside layers without one
MIXED = f"""model.config={{model_type: qwen2, vocab_size: 320, hidden_size: 128, num_hidden_layers: 2,
 num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 128, eos_token_id: 2,
 use_sliding_window: true, sliding_window: {WINDOW}, layer_types: [full_attention, sliding_attention]}}"""

Kind = tuple[int, bool]  # a call's sparse_mode, and whether it has a mask
CAUSAL, BAND, BARE = (3, True), (4, True), (0, False)


@pytest.fixture(params=[None, True], ids=["no answer", "yes"])
def unmasks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the probe said yes, where it said anything, in the file that machines read."""
    npu = start(section("npu"))
    assert isinstance(npu, Npu)
    if request.param is not None:
        path = answers_file(tmp_path, npu.product.name, npu.cann, virtual=npu.asked.virtual)
        write_answers(path, {"unmasks_decodes": request.param})
    monkeypatch.setattr(machines, "ANSWERS", tmp_path)
    return bool(request.param)


@pytest.fixture
def asked(unmasks: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[Kind]]:
    """The kinds of calls of attention, apart for those that run at once and those of captured steps."""
    import torch_npu

    found: dict[str, Counter[Kind]] = {"eager": Counter(), "captured": Counter()}
    inner = getattr(torch_npu, FUSED_ATTENTION)

    def watched(form: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            found[form][arguments["sparse_mode"], arguments.get("atten_mask") is not None] += 1
            return function(**arguments)

        return call

    eager = watched("eager", inner)
    eager.out = watched("captured", inner.out)
    monkeypatch.setattr(torch_npu, FUSED_ATTENTION, eager)
    return found


def test_a_call_of_decodes_alone_has_no_mask_where_the_probe_said_yes(
    unmasks: bool, asked: dict[str, Counter[Kind]]
) -> None:
    """Each step is also held to the oracle of tests/attention."""
    bench = Bench(operators("npu", "fused", shape(windows=(None, 20)))[1])
    latents = test_latent.bench(("npu", "fused"))
    decodes = BARE if unmasks else CAUSAL
    for spans, kind in (({0: 15, 2: 1}, CAUSAL), ({0: 1, 2: 1}, decodes), ({2: 1}, decodes)):
        asked["eager"].clear()
        bench.step(spans)
        assert asked["eager"] == {kind: 1, BAND: 1}
        asked["eager"].clear()
        latents.step(spans)
        assert asked["eager"] == {kind: len(latents.layers)}


def test_captured_decodes_give_the_same_tokens_with_a_mask_and_without(
    unmasks: bool, asked: dict[str, Counter[Kind]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["model.path=null", "model.weights=random", MIXED.replace("\n", "")]
    answers, _ = serve(engine_of(*model, "device.graphs=4"))
    decodes = BARE if unmasks else CAUSAL
    assert asked["captured"].keys() == {decodes, BAND}
    assert asked["captured"][decodes] == asked["captured"][BAND] > 10, "those of replays too"
    monkeypatch.setattr(machines, "ANSWERS", tmp_path / "empty")
    assert answers == serve(engine_of(*model))[0]
