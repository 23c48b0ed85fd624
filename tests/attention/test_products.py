"""Shapes that a product's fused attention does not take are refused with the key, value, limit and fix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from devices.ascend_limits import MOST_SPANS, PRODUCTS, product
from models.step.graphs import ladder
from tests.attention.test_attention import WIDE, shape
from tests.each_of import each_of

NAMES = ["910B", "910C", "950"]
ATB = {"dtype": torch.float16, "page_size": 128, "windows": (None, None)}


def good(**changes: object):
    return shape(**{"dtype": torch.bfloat16, "page_size": 128, **changes})


def refusal(name: str, takes_float32: bool = False, **changes: object) -> str:
    with pytest.raises(ValueError, match=r"or set device\.attention to reference$") as caught:
        product(name, "").check(good(**changes), takes_float32=takes_float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_has_today_is_taken(name):
    for sizes in ({}, {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8}, {"num_kv_heads": 4}):
        product(name, "").check(good(**sizes))


@each_of("name", NAMES)
@each_of(
    "changes, words",
    [
        ({"dtype": torch.float32}, "model.dtype is float32; fused attention of the {} takes "),
        ({"head_dim": 80}, "the model's head_dim is 80; fused attention of the {} takes 64 or 128: choose"),
        ({"head_dim": 192}, "the model's head_dim is 192; "),
        ({"num_heads": 512, "num_kv_heads": 256}, "the model has 512 query heads over 256; fused attention"),
        ({"num_heads": 128, "num_kv_heads": 1}, "the model has 128 query heads over 1; fused attention"),
        ({"page_size": 8}, "cache.page_size is 8; fused attention "),
        ({"page_size": 1040}, "cache.page_size is 1040; "),
    ],
)
def test_what_is_beyond_a_limit_is_refused(name, changes, words):
    assert refusal(name, **changes).startswith(words.format(name))


@each_of(
    "changes, words",
    [
        ({"windows": (None, 7)}, "the model's head_dim is 256, and it has a sliding window of 7"),
        ({"has_sinks": True}, "the model's head_dim is 256, and it has attention sinks"),
        ({"page_size": 64}, "cache.page_size is 64; fused attention of the 910B takes 128, 256, 384, 512"),
    ],
)
def test_what_heads_of_256_cannot_have_is_refused(changes, words):
    assert refusal("910B", **WIDE | changes).startswith(words)


def test_a_product_without_this_attention_is_refused():
    said = refusal("910", dtype=torch.float16)
    assert said.startswith("device.product is 910, for which there is no fused attention here, but for 310P,")


@pytest.mark.parametrize(
    "sizes", [{}, {"page_size": 64}, {"head_dim": 256, "page_size": 64}, {"head_dim": 80}]
)
def test_what_atb_takes_is_taken(sizes):
    product("310P", "").check(good(**ATB | sizes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, "model.dtype is float32; fused attention of the 310P takes float16: set"),
        (
            {"head_dim": 72},
            "the model's head_dim is 72; attention of the 310P takes a multiple of 16 to 256:",
        ),
        ({"head_dim": 272}, "the model's head_dim is 272; "),
        (
            {"page_size": 32},
            "cache.page_size is 32; attention of the 310P takes 128 or 64 with heads of 128:",
        ),
        (
            {"head_dim": 256},
            "cache.page_size is 128; attention of the 310P takes 64 with heads of 256: set 64",
        ),
        ({"windows": (None, 9)}, "layer 1 of the model has a sliding window of 9; attention of the 310P has"),
    ],
)
def test_what_is_beyond_a_limit_of_atb_is_refused(changes, words):
    assert refusal("310P", **ATB | {"head_dim": 128} | changes).startswith(words)


def test_float32_is_taken_only_where_a_test_says_so():
    product("910B", "").check(good(dtype=torch.float32), takes_float32=True)
    with pytest.raises(ValueError, match=r"float64; .* bfloat16, float16 or float32: set model.dtype to bf"):
        product("910B", "").check(good(dtype=torch.float64), takes_float32=True)


@pytest.mark.parametrize("name", ["310P", "910"])
def test_bfloat16_is_refused_where_no_operator_takes_it(name):
    said = f"^model.dtype is bfloat16; the {name} computes in float16 or float32: set model.dtype to float16$"
    with pytest.raises(ValueError, match=said):
        product(name, "").check_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match=said):
        product(name, "").check(good())


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("Ascend310P3", "310P"),
        ("Ascend910A", "910"),
        ("Ascend910B", "910"),  # another name of the first series
        ("Ascend910B1", "910B"),
        ("Ascend910B4-1", "910B"),
        ("Ascend910_9391", "910C"),
        ("Ascend950PR_9589", "950"),
    ],
)
def test_a_device_is_known_by_the_name_it_gives_itself(chip, name):
    assert product(None, chip).name == name
    assert product("950", chip).name == "950"


def test_an_unknown_device_is_refused_with_what_may_be_said():
    with pytest.raises(ValueError, match=r"'Ascend310B1', which is no product known here: set device"):
        product(None, "Ascend310B1")


@pytest.mark.parametrize(
    ("name", "most", "page_size", "kept"),
    [
        ("910B", 256, 128, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("950", 8, 128, [1, 2, 4, 8]),
        ("950", 100, 128, [1, 4, 32, 100]),
        ("950", 256, 128, [1, 16, 128, 256]),
        ("950", 512, 128, [128, 256, 384, 512]),
    ],
)
def test_of_more_sizes_than_a_product_holds_a_sample_is_captured(
    name: str, most: int, page_size: int, kept: list[int]
) -> None:
    sizes = product(name, "").graph_sizes(ladder(most, page_size), 2, page_size)
    assert sizes == kept
    assert all(above - below <= page_size for below, above in pairwise([0, *sizes]))


def test_graphs_are_bounded_by_streams() -> None:
    wanted = ladder(60 * 128, 128)
    assert len(wanted) == 67
    assert product("910B", "").graph_sizes(wanted, 24, 128) == wanted
    sampled = product("910B", "").graph_sizes(wanted, 25, 128)
    assert (len(sampled), sampled[0], sampled[-1]) == (66, 1, 60 * 128)
    assert product("910B", "").graph_sizes(wanted, 24, 128, joins=True) == sampled
    assert product("950", "").graph_sizes([1, 2, 4, 8], 5, 128) == [1, 2, 4, 8]
    assert product("950", "").graph_sizes([1, 2, 4, 8], 5, 128, joins=True) == [1, 8], "each has two graphs"
    draws = replace(product("950", ""), captures_draws=True)
    assert draws.graph_sizes([1, 2, 4, 8], 5, 128) == [1, 8], "each has two graphs"
    with pytest.raises(ValueError, match="67 graphs of 32 layers; the 910B holds 52: set it to at most 6656"):
        product("910B", "").graph_sizes(wanted, 32, 128)
    with pytest.raises(ValueError, match="5 layers; the 950 holds 4: set it to at most 512, or raise cache"):
        product("950", "").graph_sizes(ladder(513, 128), 5, 128)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_may_be_as_long_as_a_decode_reads(name):
    product(name, "").check_longest(262145)
    said = f"have 262146 tokens; .* the {name} reads 262144 keys: set scheduler.max_request_tokens to 262145,"
    with pytest.raises(ValueError, match=said):
        product(name, "").check_longest(262146)


@pytest.mark.parametrize("each", PRODUCTS, ids=lambda each: each.name)
def test_every_span_is_in_one_call_and_no_call_holds_what_it_may_not(each):
    for lens in ([5], [1] * 3 + [7, 2], [7, 1, 1, 3, 1], [1] * (2 * MOST_SPANS) + [3]):
        cuts, most = list(each.cuts(np.array(lens))), each.most_spans
        assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
        assert cuts[-1][1] == len(lens)
        assert all(0 < last - first <= most <= MOST_SPANS for first, last in cuts)
        if each.is_mixed:
            assert len(cuts) == -(-len(lens) // most)
        else:
            single = [{length == 1 for length in lens[first:last]} for first, last in cuts]
            assert all(len(kinds) == 1 for kinds in single)
            edges = [a != b for a, b in pairwise(length == 1 for length in lens)]
            assert len(cuts) <= 1 + sum(edges) + len(lens) // MOST_SPANS


@pytest.mark.parametrize("name", [each.name for each in PRODUCTS])
def test_int8_is_refused_where_tokens_have_no_scale(name: str) -> None:
    named = product(name, "")
    if name in ("310P", "910", "950"):
        with pytest.raises(
            ValueError, match=f"the {name} takes no scale for each token, 910B, 910C do"
        ) as said:
            named.check_int8(torch.float16, {"int8", "static"}, 100)
        assert ("of msModelSlim in static W8A8," in str(said.value)) == (name == "310P")
    if name in ("910", "950"):
        with pytest.raises(ValueError, match=f"the {name} has no products in int8, 310P, 910B, 910C do: use"):
            named.check_int8(torch.float16, {"static"}, 100)
        return
    named.check_int8(torch.float16, {"static"}, 100)
    with pytest.raises(ValueError, match=f"dtype is float32; .* set model.dtype to {named.dtypes[0]}"):
        named.check_int8(torch.float32, {"static"}, 100)
    if name != "310P":
        named.check_int8(torch.bfloat16, {"int8", "static", "w4a8"}, 100)
        named.check_int8(torch.float16, {"int8", "static", "w4a8"}, 65535)
    with pytest.raises(ValueError, match=f"a linear has a side of 65536; .* of the {name} take up to 65535"):
        named.check_int8(torch.float16, {"static"}, 65536)


@pytest.mark.parametrize("name", [each.name for each in PRODUCTS])
def test_weights_in_int8_alone_are_checked_where_an_operator_multiplies_them(name: str) -> None:
    named = product(name, "")
    named.check_int8(torch.float16, {"w8a16"}, 65535)
    for dtype, largest, said in ((torch.float32, 100, "dtype is float32"), (torch.float16, 65536, "a side")):
        if named.has_int4:
            with pytest.raises(ValueError, match=said):
                named.check_int8(dtype, {"w8a16"}, largest)
        else:
            named.check_int8(dtype, {"w8a16"}, largest)
