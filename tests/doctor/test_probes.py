"""Each probe answers yes where the device is right and no where it is wrong.

Recipes follow the answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.divided import DividedLatentAttention, shapes_of
from devices.ascend_limits import FRACTAL_NZ, PROBED, PRODUCTS, AscendProduct, product
from doctor.verify import probes
from doctor.verify.npu import mask_questions, rank_questions
from doctor.verify.npu.latent_questions import DEEPSEEK
from doctor.verify.npu.questions import NotCaptured, Probe, captured, is_refusal
from doctor.verify.npu.rank_questions import of_ranks
from doctor.verify.probes import PROBES, answer
from models.parallel.group import ALONE, Alone
from models.sampling.sampler import Sampler
from recipes import machine as machines
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import decoder_config
from recipes.machine import Npu, start
from recipes.schema.reader import load
from tests.attention.test_atb import answering_as
from tests.attention.test_attention import Bench, shape
from tests.device_kinds import operators, section, stand_in_alone
from tests.thorough import THOROUGH, cases
from virtual_npu.contract import Conditions
from virtual_npu.operators import operator

pytestmark = [pytest.mark.npu, stand_in_alone]

ATTENTION = "npu_fused_infer_attention_score"


@pytest.fixture
def npu() -> Npu:
    found = start(section("npu"))
    assert isinstance(found, Npu)
    return found


@pytest.fixture
def wrong(npu: Npu) -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    """Put another function in an operator's place, as long as the test runs."""
    import virtual_npu

    device, changed = virtual_npu.start(fp32=True), []

    def put(name: str, function: Callable[..., Any]) -> None:
        changed.append(name)
        device.implement(name, function)

    yield put
    for name in changed:
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            device.implement(name, getattr(getattr(torch.ops.aten, packet), overload or "default"))
    conditions, device.conditions = device.conditions, None
    assert conditions is not None
    device.contract(conditions)


def ask(name: str, npu: Npu) -> bool:
    probe = next(each for each in PROBES if each.name == name)
    found = answer(probe, npu)
    assert found.said
    assert found.answer is not None, found.said
    return found.answer


def test_every_answer_is_asked_for_and_of_some_product() -> None:
    probes = [*PROBES, *of_ranks(load("recipes/tiny/npu.yaml", ["parallel.tensor=2"]))]
    names = [each.name for each in probes]
    assert names == list(PROBED)
    for earlier, later in (("unmasks_decodes", "sums_latents"), ("tiles_weights", "groups_products")):
        assert names.index(earlier) < names.index(later), "whose call the earlier answer changes"
    asked = {
        name: [each.name for each in probes if each.applies(product(name, ""))] for name in ("310P", "910B")
    }
    assert set(asked["310P"]) | set(asked["910B"]) == set(PROBED)
    assert "packs_float16" not in asked["310P"]
    of_ranks_of_910c = [each.name for each in probes if each.applies(product("910C", ""))][-2:]
    sent = ["dispatches", "dispatches_beside_shared"]
    assert (asked["910B"][-3:], of_ranks_of_910c) == (["sums_products", *sent], sent)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=pytest.mark.slow if each.name == "unmasks_decodes" else [])
        for each in PROBES
        if THOROUGH or each.name != "groups_products"  # which a right device is asked beside a wrong answer
    ],
)
def test_a_right_device_is_found_right(name: str, npu: Npu) -> None:
    expected = name == "unmasks_decodes" or getattr(npu.product, name)  # the stand-in is right about it
    assert ask(name, npu) == expected


def test_a_product_that_takes_decodes_apart_is_asked_for_them_apart(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "product", product("950", ""))
    with answering_as("950"):
        assert ask("packs_float16", npu)


def largest_but_nan(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    best, place = x.nan_to_num(nan=-torch.inf).max(dim, keepdim)
    return best, place


def test_a_maximum_that_loses_nan_is_found_and_followed(
    npu: Npu, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models.ops.npu.ops import NpuOps

    wrong("aten::max.dim", largest_but_nan)
    assert not ask("keeps_nan", npu)
    logits = torch.zeros(2, 64, device=npu.device)
    logits[1, 5] = torch.nan
    assert NpuOps(npu.product).greedy(logits)[1].tolist() == [True, True]
    followed = NpuOps(replace(npu.product, keeps_nan=False))
    best, is_finite = followed.greedy(logits)
    assert is_finite.tolist() == [True, False]
    ones = torch.ones(2, device=npu.device)
    limits = {"uniform": ones / 2, "sharpness": ones}
    first, second = followed.draw(logits, best, torch.where(is_finite, best, -1), limits).tolist()
    assert first >= 0 > second, "a row without a token gets none by a draw"
    monkeypatch.setattr(npu, "product", replace(product("910", ""), keeps_nan=False))
    plain, _ = npu.operators(shape(dtype=torch.float16))
    assert plain.greedy(logits)[1].tolist() == [True, False], "without fused operators too"


def no_sort_in_a_graph(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a sort cannot be captured")


def attending(change: Callable[[dict[str, Any]], dict[str, Any]], npu: Npu, factor: float = 1) -> Any:
    """Attention of the contract, with other arguments and a factor."""

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = operator(ATTENTION)(Conditions(fp32=True), *args, **change(kwargs))
        return out * factor, lse

    return attend


def test_attention_that_is_wrong_in_float16_is_found(npu: Npu, wrong: Any) -> None:
    wrong(f"npu::{ATTENTION}", attending(dict, npu, 1.1))
    assert not ask("packs_float16", npu)


def test_wide_heads_that_are_read_wrong_are_found_and_followed(npu: Npu, wrong: Any) -> None:
    wrong(f"npu::{ATTENTION}", attending(dict, npu, 1.1))
    assert not ask("reads_wide_heads", npu)
    narrow = replace(npu.product, reads_wide_heads=False)
    with pytest.raises(ValueError, match="head_dim is 256; fused attention of the 910B takes 64 or 128"):
        narrow.check(shape(head_dim=256, windows=(None,), dtype=torch.bfloat16))


@pytest.mark.parametrize("spoilt", [0, 1])
def test_sums_of_latents_that_are_wrong_are_found_and_followed(spoilt: int, npu: Npu, wrong: Any) -> None:
    from attention.npu.latent_attention import FusedLatentAttention

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        made = operator(ATTENTION)(Conditions(), *args, **kwargs)
        made[spoilt].add_(0.5)
        return made

    wrong(f"npu::{ATTENTION}", attend)
    assert not ask("sums_latents", npu)
    whole = shape_of(128, decoder_config(DEEPSEEK))
    parts, gathered = (
        FusedLatentAttention(each, npu.device, replace(npu.product, sums_latents=False))
        for each in shapes_of(whole, 8)
    )
    group = Alone()
    group.size = 8
    with pytest.raises(ValueError, match=r"parallel\.context is 8; FusedLatentAttention gives no sums"):
        DividedLatentAttention(whole, parts, gathered, group).check()


@pytest.mark.parametrize("unmasks", [False, True])
def test_sums_of_latents_are_asked_for_with_the_calls_that_the_answers_before_give(
    unmasks: bool, npu: Npu, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = f"{ATTENTION}.out"
    wrong(f"npu::{form}", maskless_wrong(form, lambda _, lens: [max(1, each - 1) for each in lens]))
    before = Probe("unmasks_decodes", "?", lambda _: True, lambda _: (unmasks, "as said"))
    (asked,) = (each for each in PROBES if each.name == "sums_latents")
    assert [each.answer for each in probes.answers([before, asked], npu)] == [unmasks, not unmasks]


def test_calls_are_asked_about_with_weights_in_tiles_where_these_won(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_npu

    from models.ops.npu.ops import NpuOps

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        rank_questions, "in_ranks", lambda *given, **_: asked.append(given) or [(True, "right")]
    )
    recipe = load("recipes/tiny/npu.yaml", ["parallel.tensor=2", "device.virtual=true"])
    before = Probe("tiles_weights", "?", lambda _: True, lambda _: (True, "faster"))
    (summed,) = (each for each in of_ranks(recipe) if each.name == "sums_products")
    assert all(each.answer for each in probes.answers([before, summed], npu))
    ((_, body, tiling),) = asked
    assert tiling.tiles_weights
    formats = []

    def linear_summed(_: NpuOps, x: Tensor, packed: tuple[Tensor, None], group: Alone) -> Tensor:
        formats.append(int(torch_npu.get_npu_format(packed[0])))
        return x

    monkeypatch.setattr(NpuOps, "linear_summed", linear_summed)
    assert body(recipe, Alone(), tiling) == (False, "right, and as it was: a stand-in has no times")
    assert set(formats) == {FRACTAL_NZ}


def maskless_wrong(
    name: str, lens_seen: Callable[[int, list[int]], list[int]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention whose calls without a mask read other keys: `lens_seen` of the output's place and lengths."""

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if kwargs.get("atten_mask") is None:
            place = kwargs["out"][0].data_ptr() if "out" in kwargs else 0
            kwargs["actual_seq_lengths_kv"] = lens_seen(place, kwargs["actual_seq_lengths_kv"])
        found: tuple[Tensor, Tensor] = operator(name)(Conditions(), *args, **kwargs)
        return found

    return attend


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lengths of the first replay", "filler"])
def test_decodes_that_are_wrong_without_a_mask_in_graphs_alone_are_found(
    fault: str, npu: Npu, wrong: Any
) -> None:
    """As vllm-ascend #12605 saw them: right at once and in a first replay, wrong in others."""
    first: dict[int, list[int]] = {}

    def frozen(place: int, lens: list[int]) -> list[int]:
        """No more keys than in the first replay."""
        return [min(pair) for pair in zip(lens, first.setdefault(place, lens))]

    def like_filler(_: int, lens: list[int]) -> list[int]:
        """Where the last rows are filler, a row has no more keys than the page that it begins with."""
        return [min(each, 128) for each in lens] if lens[-2:] == [1, 1] else lens

    form = f"{ATTENTION}.out"
    lens_seen = frozen if fault == "lengths of the first replay" else like_filler
    wrong(f"npu::{form}", maskless_wrong(form, lens_seen))
    assert not ask("unmasks_decodes", npu)


@pytest.mark.parametrize("lost_after", [1536, pytest.param(8192, marks=pytest.mark.slow)])
def test_decodes_that_lose_the_last_of_many_keys_without_a_mask_are_found(
    lost_after: int, npu: Npu, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shortened(_: int, lens: list[int]) -> list[int]:
        return [each - 4 if each > lost_after else each for each in lens]

    shapes = mask_questions._shapes(npu.product, mask_questions.HEADS[-1:])
    *_, ordinary = (each for each in shapes if "bfloat16" in each[0])
    monkeypatch.setattr(mask_questions, "_shapes", lambda *_: [ordinary])
    assert ask("unmasks_decodes", npu)
    form = f"{ATTENTION}.out"
    wrong(f"npu::{form}", maskless_wrong(form, shortened))
    assert not ask("unmasks_decodes", npu)


@pytest.mark.parametrize("name", ["reads_wide_heads", "sums_latents"])
def test_a_replay_that_gives_nan_is_found(name: str, npu: Npu, wrong: Any) -> None:
    form = f"{ATTENTION}.out"

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = operator(form)(Conditions(), *args, **kwargs)
        found[0][-1, -1, -1] = torch.nan
        return found

    wrong(f"npu::{form}", attend)
    assert not ask(name, npu)


def test_a_cosine_that_is_nan_is_found(npu: Npu, wrong: Any) -> None:
    wrong("aten::sin", lambda x: x.sin().index_fill_(0, torch.tensor([5], device=x.device), torch.nan))
    assert not ask("exact_angles", npu)


def test_a_band_that_counts_a_querys_own_key_is_found_and_followed(npu: Npu, wrong: Any) -> None:
    def without_own(call: dict[str, Any]) -> dict[str, Any]:
        return call | {"pre_tokens": call["pre_tokens"] - 1} if call["sparse_mode"] == 4 else call

    assert not ask("counts_own_key", npu)
    windowed = shape(windows=(20,), page_size=32)
    bench = Bench(operators("npu", "fused", windowed)[1])
    wrong(f"npu::{ATTENTION}", attending(without_own, npu))
    assert ask("counts_own_key", npu)
    with pytest.raises(AssertionError):
        bench.step({0: 60})
    followed = Bench(operators("npu", "fused", windowed)[1])
    followed.attention.product = replace(npu.product, counts_own_key=True)
    followed.step({0: 60})


def test_a_band_that_gives_no_window_is_named(npu: Npu, wrong: Any) -> None:
    wrong(f"npu::{ATTENTION}", attending(lambda call: call | {"pre_tokens": 2048}, npu))
    probe = next(each for each in PROBES if each.name == "counts_own_key")
    found = answer(probe, npu)
    assert not found.answer
    assert found.said.startswith("layers with a window are wrong: ")


@pytest.mark.parametrize(
    ("name", "operator_name", "spoilt"),
    [
        ("divides_gates", "npu_moe_gating_top_k_softmax_v2", lambda made: (made[0] * 1.1, *made[1:])),
        ("joins_heads", "npu_qkv_rms_norm_rope_cache", lambda made: (made[0], made[1] * 1.1, made[2])),
        pytest.param(
            *("groups_products", "npu_grouped_matmul", lambda made: [each * 1.1 for each in made]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["weights", "keys", "products"],
)
def test_a_launch_that_no_other_engine_has_is_followed_where_it_is_right(
    name: str,
    operator_name: str,
    spoilt: Callable[[Any], Any],
    npu: Npu,
    wrong: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not getattr(npu.product, name), "until it is asked, what other engines call is called"
    monkeypatch.setattr(npu, "product", replace(npu.product, **{name: True}))
    assert ask(name, npu), "right, and as it was"
    inner = partial(operator(operator_name), Conditions(fp32=True))
    wrong(f"npu::{operator_name}", lambda *args, **kwargs: spoilt(inner(*args, **kwargs)))
    assert not ask(name, npu)


@pytest.mark.parametrize(
    ("name", "operator_name", "is_spoilt"),
    [
        ("joins_heads", "npu_qkv_rms_norm_rope_cache", lambda qkv, *_: qkv.dtype == torch.float16),
        ("joins_heads", "npu_qkv_rms_norm_rope_cache", lambda qkv, *rest: rest[-1][1] == 1),
        pytest.param(
            *("groups_products", "npu_grouped_matmul", lambda sides, *_: sides[0].dtype == torch.float16),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float16", "one key head", "products in float16"],
)
def test_a_launch_that_is_wrong_for_some_models_alone_is_found(
    name: str, operator_name: str, is_spoilt: Callable[..., bool], npu: Npu, wrong: Any
) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        made = operator(operator_name)(Conditions(fp32=True), *args, **kwargs)
        return type(made)(each * 1.1 for each in made) if is_spoilt(*args) else made

    wrong(f"npu::{operator_name}", call)
    assert not ask(name, npu)


def test_a_shared_expert_that_is_not_waited_for_is_found(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.ops.npu.ops import NpuOps

    monkeypatch.setattr(npu, "product", replace(npu.product, overlaps_experts=True))
    assert ask("overlaps_experts", npu)
    begin = NpuOps.begin_beside

    def early(ops: NpuOps, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        begun = begin(ops, compute)
        return lambda: begun() * (1 + ops.product.overlaps_experts)

    monkeypatch.setattr(NpuOps, "begin_beside", early)
    assert not ask("overlaps_experts", npu)


def test_tiles_that_no_graph_takes_are_found(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    from virtual_npu import aclop

    tiled = replace(npu.product, tiles_weights=True)
    monkeypatch.setattr(npu, "product", tiled)
    assert ask("tiles_weights", npu)
    monkeypatch.setattr(aclop, "PRODUCTS_OF_TILES", set())
    assert not ask("tiles_weights", npu)


def test_weights_lie_in_tiles_where_the_answer_is_yes(npu: Npu) -> None:
    import torch_npu

    from models.ops.npu.ops import NpuOps

    weight = torch.ones(32, 16, dtype=torch.bfloat16, device=npu.device)
    for tiles in (False, True):
        packed, _ = NpuOps(replace(npu.product, tiles_weights=tiles)).pack(weight, None)
        assert (int(torch_npu.get_npu_format(packed)) == FRACTAL_NZ) == tiles
    assert [each.name for each in PRODUCTS if each.tiles_weights] == ["310P"]


def test_slices_that_are_copies_are_found_and_not_used(npu: Npu, wrong: Any) -> None:
    from attention.npu.atb_attention import AtbAttention

    wrong("aten::zero_", lambda x: x)
    assert not ask("slices_tiles", npu)
    on_310p = product("310P", "")
    for slices in (True, False):
        attention = AtbAttention(shape(page_size=128), npu.device, replace(on_310p, slices_tiles=slices))
        assert attention.indexed == (not slices)


def test_draws_that_no_graph_takes_are_found_and_launched_one_by_one(npu: Npu, wrong: Any) -> None:
    import virtual_npu
    from models.ops.npu.ops import NpuOps

    wrong("aten::sort", torch.ops.aten.sort.default)  # puts back what follows
    virtual_npu.start(fp32=True).implement("aten::sort", torch.ops.aten.sort.default, no_sort_in_a_graph)
    assert not ask("captures_draws", npu)
    assert NpuOps(npu.product).captures_draws
    assert not NpuOps(replace(npu.product, captures_draws=False)).captures_draws


def test_cosines_that_are_off_are_found(npu: Npu, wrong: Any) -> None:
    wrong("aten::cos", lambda x: (x * (1 + 2**-20)).cos())
    assert not ask("exact_angles", npu)


def test_a_recipe_follows_what_was_written(
    tmp_path: Path,
    npu: Npu,
    wrong: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong("aten::max.dim", largest_but_nan)
    monkeypatch.setattr(
        probes, "PROBES", tuple(each for each in PROBES if each.name in ("keeps_nan", "exact_angles"))
    )
    asked = ["recipes/tiny/npu.yaml", "device.virtual=true", "device.virtual_fp32=true"]
    assert probes.main([*asked, "--answers", str(tmp_path)]) == 0
    assert [each["answer"] for each in json.loads(capsys.readouterr().out)] == [False, True]
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == {
        "torch_npu": npu.release,
        "chip": "Ascend910B1",
        "keeps_nan": False,
        "exact_angles": True,
    }
    monkeypatch.setattr(machines, "ANSWERS", tmp_path)
    with caplog.at_level(logging.INFO):
        followed = start(section("npu"))
    assert isinstance(followed, Npu)
    assert not followed.product.keeps_nan
    assert any("keeps_nan no (was yes)" in line for line in caplog.messages)


class OfLeader(Alone):
    """All ranks, whose leader says this of its device."""

    def __init__(self, leaders: AscendProduct) -> None:
        super().__init__()
        self._leaders = leaders

    def from_leader(self, make: Callable[[], str], name: str) -> str:
        said = {name: getattr(self._leaders, name) for name in PROBED}
        return json.dumps({"product": self._leaders.name, "cann": "9.9"} | said)


def test_ranks_on_machines_with_other_answers_do_not_start(npu: Npu) -> None:
    """They would wait for each other in different collectives, or add up other numbers."""
    npu.join(OfLeader(npu.product), ALONE, torch.bfloat16)
    other = replace(npu.product, sums_products=not npu.product.sums_products)
    said = r"sums_products is false here, with CANN .*, and true on the leader, with CANN 9\.9: use one"
    with pytest.raises(ValueError, match=said):
        npu.join(OfLeader(other), ALONE, torch.bfloat16)
    with pytest.raises(ValueError, match="is a 910B here, and a 910C on the leader: use machines of one"):
        npu.join(OfLeader(product("910C", "")), ALONE, torch.bfloat16)


def test_a_machine_without_an_npu_has_no_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        probes.main(["recipes/tiny/npu.yaml", "device.kind=cpu", "device.graphs=0", "device.compile=false"])
        == 0
    )
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_what_takes_several_ranks_is_asked_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = cases(["sums_products", "dispatches_beside_shared"], list(PROBED[-3:]))
    monkeypatch.setattr(probes, "PROBES", ())
    monkeypatch.setattr(probes, "of_ranks", lambda recipe: [p for p in of_ranks(recipe) if p.name in asked])
    recipe = ["recipes/tiny/npu.yaml", "device.virtual=true", "parallel.tensor=2"]
    assert probes.main([*recipe, "--answers", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["answer"], each["said"].split(",")[0]) for each in told] == [
        (name, False, "right") for name in asked
    ]


@pytest.mark.parametrize(("name", "spoilt"), [("kv_cache", 10), ("query", 0)])
def test_one_launch_before_latent_attention_that_is_wrong_is_found(
    name: str, spoilt: int, npu: Npu, wrong: Any
) -> None:
    """In what it writes, and in what it returns."""

    def prolog(*args: Any, **kwargs: Any) -> Any:
        made = operator("npu_mla_prolog_v3")(Conditions(), *args, **kwargs)
        (args[spoilt] if name != "query" else made[spoilt]).mul_(1.1)
        return made

    wrong("npu::npu_mla_prolog_v3", prolog)
    assert not ask("joins_latents", npu)


def test_what_joins_all_before_latent_attention_is_followed(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "product", replace(npu.product, joins_latents=True))
    assert ask("joins_latents", npu), "right, and as it was"


def asked_of(npu: Npu, *errors: Exception | None) -> list[probes.Answer]:
    """The answers where each question ends in an error, or in a yes."""
    names = ("tiles_weights", "overlaps_experts", "prefetches")

    def asks(error: Exception | None) -> Callable[[Npu], tuple[bool, str]]:
        def ask(_: Npu) -> tuple[bool, str]:
            if error is not None:
                raise error
            return True, "right"

        return ask

    questions = [Probe(name, "?", lambda _: True, asks(error)) for name, error in zip(names, errors)]
    return list(probes.answers(questions, npu))


LOST = "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout, error code is 507015"


@pytest.mark.parametrize("error", [RuntimeError(LOST), torch.OutOfMemoryError("NPU out of memory.")])
def test_an_error_of_the_device_is_no_answer_and_the_last_question(error: Exception, npu: Npu) -> None:
    told = asked_of(npu, None, error, None)
    assert [(each.answer, each.is_right) for each in told] == [(True, True), (None, False), (None, False)]
    assert told[1].said == str(error)
    assert told[2].said == "not asked after the error of overlaps_experts"
    assert npu.product.tiles_weights, "the next questions are asked of a product that follows the answer"


def test_an_error_of_one_question_alone_is_no_answer_to_it(npu: Npu) -> None:
    told = asked_of(npu, OSError("a rank has ended: rank 1 (-6)"), AttributeError("no such operator"), None)
    assert [each.answer for each in told] == [None, None, True]
    assert told[0].said == "OSError: a rank has ended: rank 1 (-6)"


@pytest.mark.parametrize(
    "refused",
    [
        "NPU function error: call aclnnGroupedMatmulV5 failed, error code is 161002",
        "aclnnQkvRmsNormRopeCache or aclnnQkvRmsNormRopeCacheGetWorkspaceSize not in libopapi.so",
    ],
)
def test_a_call_that_the_device_refuses_or_lacks_is_a_no(refused: str, npu: Npu) -> None:
    told = asked_of(npu, RuntimeError(refused), None)
    assert [(each.answer, each.is_right) for each in told] == [(False, True), (True, True)]


def test_what_came_first_says_whether_a_capture_was_refused(npu: Npu) -> None:
    """The end of the capture that it broke off may raise an error of its own."""
    module = torch.get_device_module("npu")
    for said, kind in (("error code is 107030", NotCaptured), ("error code is 507015", RuntimeError)):
        with pytest.raises(RuntimeError) as raised, captured(module.NPUGraph()):
            raise RuntimeError(f"NPU function error: aclrtMemcpy, {said}")
        assert type(raised.value) is kind
        assert is_refusal(raised.value) == (kind is NotCaptured)
        assert module.current_stream() == module.default_stream()


def test_a_call_that_a_rank_is_refused_is_a_no(npu: Npu) -> None:
    recipe = load("recipes/tiny/npu.yaml", ["device.virtual=true"])

    def body(said: str) -> Any:
        def ask(*_: object) -> Any:
            raise RuntimeError(said)

        return ask

    refused = rank_questions._found(body("error code is 161002"), recipe, ALONE, npu.product)
    assert refused == (False, "error code is 161002")
    with pytest.raises(RuntimeError, match="507015"):
        rank_questions._found(body(LOST), recipe, ALONE, npu.product)


def test_memory_that_ends_in_a_capture_is_no_refusal_of_it(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(sampler: Sampler, logits: Tensor, *_: Any) -> Tensor:
        if torch.get_device_module("npu").is_current_stream_capturing():
            raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2 GiB")
        return logits[:, 0]

    monkeypatch.setattr(Sampler, "draw", draw)
    with pytest.raises(torch.OutOfMemoryError):
        ask("captures_draws", npu)


def test_answers_are_kept_and_told_whatever_comes_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_: Npu) -> tuple[bool, str]:
        (kept,) = (tmp_path / "new").iterdir()  # as after an abort
        assert json.loads(kept.read_text())["keeps_nan"] is True
        raise KeyboardInterrupt

    first = next(each for each in PROBES if each.name == "keeps_nan")
    monkeypatch.setattr(probes, "PROBES", (first, replace(first, name="exact_angles", ask=ends)))
    asked = ["recipes/tiny/npu.yaml", "device.virtual=true", "device.virtual_fp32=true", "--answers"]
    with pytest.raises(KeyboardInterrupt):
        probes.main([*asked, str(tmp_path / "new")])
    assert [each["answer"] for each in json.loads(capsys.readouterr().out)] == [True]


def test_a_run_with_a_question_that_is_not_answered_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(_: Npu) -> tuple[bool, str]:
        raise RuntimeError(LOST)

    first, *_, last = (each for each in PROBES if each.name in ("keeps_nan", "exact_angles"))
    monkeypatch.setattr(probes, "PROBES", (replace(first, ask=lost), last))
    asked = ["recipes/tiny/npu.yaml", "device.virtual=true", "device.virtual_fp32=true", "--answers"]
    assert probes.main([*asked, str(tmp_path)]) == 1
    assert [each["answer"] for each in json.loads(capsys.readouterr().out)] == [None, None]
    (kept,) = tmp_path.iterdir()
    said = json.loads(kept.read_text())
    assert said.keys() == {"torch_npu", "chip"}
    kept.write_text(json.dumps(said | {"keeps_nan": False, "joins_heads": True}))
    assert probes.main([*asked, str(tmp_path)]) == 1
    assert json.loads(kept.read_text()) == said | {"keeps_nan": False}, "a no stays until it is asked again"


def test_a_folder_that_takes_no_answers_is_refused_before_any_question(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match=r"answers cannot be written to .*out/ascend \(Not a directory\): "):
        probes.main(
            ["recipes/tiny/npu.yaml", "device.virtual=true", "--answers", str(tmp_path / "out/ascend")]
        )
