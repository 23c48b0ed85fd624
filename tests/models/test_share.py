"""The shares of all ranks make up the whole decoder, with each part where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.config import DecoderConfig, RecurrentConfig, RopeConfig, layer_specs
from models.parallel.share import Share
from models.quantization import Quantization
from tests.each_of import each_of

WHOLE = DecoderConfig(
    family="llama",
    vocab_size=509,
    hidden_size=48,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=96,
    rms_eps=1e-5,
    rope=RopeConfig("default", 1e4, 16),
    layers=layer_specs((None, None)),
    tie_embeddings=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm="none",
    dtype="float32",
    max_positions=128,
    eos_token_ids=(2,),
)
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


def shares(count: int) -> list[Share]:
    return [Share(rank, count) for rank in range(count)]


def test_one_rank_holds_the_decoder_as_it_is() -> None:
    assert Share().part(WHOLE) == WHOLE
    assert Share().tokens(WHOLE) == range(509)


def test_a_rank_has_its_number_of_heads_inner_columns_and_tokens() -> None:
    for share in shares(4):
        part = share.part(WHOLE)
        assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 24)
        assert part.vocab_size == 128  # 127.25 are rounded up
        rest = {"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 96, "vocab_size": 509}
        assert replace(part, **rest) == WHOLE


def test_the_ranks_hold_each_token_once() -> None:
    assert [share.tokens(WHOLE) for share in shares(4)] == [
        range(128), range(128, 256), range(256, 384), range(384, 509),
    ]  # fmt: skip
    few = replace(WHOLE, vocab_size=5)
    assert [len(share.tokens(few)) for share in shares(4)] == [2, 2, 1, 0]
    assert [len(share.tokens(few)) for share in shares(8)] == [1] * 5 + [0] * 3


@each_of(
    "name, first, last",
    [
        (f"{ATTENTION}q_proj.weight", (slice(0, 32),), (slice(96, 128),)),
        (f"{ATTENTION}q_proj.bias", (slice(0, 32),), (slice(96, 128),)),
        (f"{ATTENTION}k_proj.weight", (slice(0, 16),), (slice(48, 64),)),
        (f"{ATTENTION}v_proj.weight_scale", (slice(0, 16),), (slice(48, 64),)),
        (f"{MLP}gate_proj.weight", (slice(0, 24),), (slice(72, 96),)),
        (f"{MLP}up_proj.bias", (slice(0, 24),), (slice(72, 96),)),
        (f"{ATTENTION}o_proj.weight", (slice(None), slice(0, 32)), (slice(None), slice(96, 128))),
        (f"{MLP}down_proj.weight", (slice(None), slice(0, 24)), (slice(None), slice(72, 96))),
        (f"{MLP}down_proj.weight_scale", (), ()),
        (f"{ATTENTION}o_proj.bias", (), (slice(0, 0),)),
        (f"{MLP}down_proj.bias", (), (slice(0, 0),)),
        ("model.embed_tokens.weight", (slice(0, 128),), (slice(384, 509),)),
        ("lm_head.weight", (slice(0, 128),), (slice(384, 509),)),
        ("lm_head.weight_scale", (slice(0, 128),), (slice(384, 509),)),
        (f"{ATTENTION}q_norm.weight", (), ()),
        ("model.layers.1.input_layernorm.weight", (), ()),
        ("model.norm.weight", (), ()),
    ],
)
def test_a_tensor_is_cut_by_its_role(name: str, first: tuple[slice, ...], last: tuple[slice, ...]) -> None:
    assert Share(0, 4).slices(name, WHOLE) == first
    assert Share(3, 4).slices(name, WHOLE) == last


GATED, KIMI = RecurrentConfig("gated", 4, 8, 6, 5, 4), RecurrentConfig("kimi", 4, 4, 6, 6, 4)
STATE, OF_KIMI = "model.layers.0.linear_attn.", "model.layers.0.self_attn."


@each_of(
    "recurrent, name, last, ranges",
    [
        (GATED, f"{STATE}in_proj_qkv.weight", (), (slice(18, 24), slice(42, 48), slice(78, 88))),
        (GATED, f"{STATE}conv1d.weight", (), (slice(18, 24), slice(42, 48), slice(78, 88))),
        (GATED, f"{STATE}in_proj_z.weight_scale", (slice(30, 40),), ()),
        (GATED, f"{STATE}in_proj_a.weight", (slice(6, 8),), ()),
        (GATED, f"{STATE}A_log", (slice(6, 8),), ()),
        (GATED, f"{STATE}norm.weight", (), ()),
        (GATED, f"{STATE}out_proj.weight", (slice(None), slice(30, 40)), ()),
        (GATED, f"{STATE}out_proj.weight_scale", (), ()),
        (GATED, f"{STATE}out_proj.bias", (slice(0, 0),), ()),
        (replace(GATED, is_interleaved=True), f"{STATE}in_proj_qkvz.weight", (slice(96, 128),), ()),
        (KIMI, f"{OF_KIMI}q_proj.weight", (slice(18, 24),), ()),
        (KIMI, f"{OF_KIMI}v_conv1d.weight", (slice(18, 24),), ()),
        (KIMI, f"{OF_KIMI}f_a_proj.weight", (), ()),
        (KIMI, f"{OF_KIMI}f_b_proj.weight", (slice(18, 24),), ()),
        (KIMI, f"{OF_KIMI}A_log", (slice(None), slice(None), slice(3, 4)), ()),
        (KIMI, f"{OF_KIMI}dt_bias", (slice(18, 24),), ()),
        (KIMI, f"{ATTENTION}q_proj.weight", (slice(96, 128),), ()),  # it has no state
    ],
)
def test_a_tensor_of_a_state_is_cut_by_heads(
    recurrent: RecurrentConfig, name: str, last: tuple[slice, ...], ranges: tuple[slice, ...]
) -> None:
    layers = (replace(WHOLE.layers[0], mixer="recurrent"), *WHOLE.layers[1:])
    config = replace(WHOLE, layers=layers, recurrent=recurrent)
    assert Share(3, 4).slices(name, config) == last
    assert Share(3, 4).ranges(name, config) == ranges
    assert Share().slices(name, config) == Share().ranges(name, config) == ()
    held = Share(3, 4).part(config).recurrent
    assert held is not None
    assert 4 * held.num_channels == recurrent.num_channels


@pytest.mark.parametrize(("num_kv_heads", "count"), [(1, 2), (1, 8), (2, 4), (2, 8), (4, 8), (4, 2), (8, 8)])
def test_a_rank_holds_the_key_value_heads_that_its_query_heads_read(num_kv_heads: int, count: int) -> None:
    config = replace(WHOLE, num_kv_heads=num_kv_heads)
    for share in shares(count):
        (rows,), (queries,) = (share.slices(f"{ATTENTION}{name}_proj.weight", config) for name in "kq")
        held = range(rows.start // 16, rows.stop // 16)
        assert len(held) == share.part(config).num_kv_heads
        group = config.num_heads // num_kv_heads
        heads = range(queries.start // 16, queries.stop // 16)
        assert {head // group for head in heads} == set(held)
        # The heads of a rank read its key-value heads in the proportion that attention takes them to
        own = len(heads) // len(held)
        assert [head // group for head in heads] == [held[number // own] for number in range(len(heads))]


@pytest.mark.parametrize(
    ("changes", "count", "possible"),
    [
        ({}, 3, "1, 2, 4, 8"),
        ({}, 16, "1, 2, 4, 8"),
        ({"intermediate_size": 90}, 4, "1, 2"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "1, 2, 3, 6, 12"),  # a rank would read one head and a half
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "1, 3, 6, 12"),
        ({"num_heads": 7, "num_kv_heads": 7}, 2, "1"),
    ],
)
def test_ranks_that_cannot_share_evenly_are_told_how_many_can(
    changes: dict[str, int], count: int, possible: str
) -> None:
    config = replace(WHOLE, **changes)
    with pytest.raises(
        ValueError, match=f"^{count} tensor ranks cannot share .*one of {possible}$"
    ) as caught:
        Share(0, count).part(config)
    assert "\n" not in str(caught.value)
    for each in map(int, possible.split(", ")):
        Share(each - 1, each).part(config)


def test_stages_hold_each_layer_once_and_the_first_ranks_hold_the_last() -> None:
    five = replace(WHOLE, layers=layer_specs((None, 4, None, 4, 8)))
    places = [Share.of_rank(rank, 2, 3) for rank in range(6)]
    assert [(each.tensor, each.stage) for each in places] == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]
    assert [each.layers(five) for each in places[::2]] == [range(3, 5), range(1, 3), range(1)]
    parts = [each.part(five) for each in places[::2]]
    assert [(part.num_layers, part.windows) for part in parts] == [(2, (4, 8)), (2, (4, None)), (1, (None,))]
    assert [each.is_last for each in places] == [True, True, False, False, False, False]
    assert [each.is_first for each in places] == [False, False, False, False, True, True]
    with pytest.raises(ValueError, match="3 stages have 2 layers; choose a number from 1 to 2"):
        places[0].part(WHOLE)


def test_a_stage_counts_what_a_checkpoint_says_of_its_own_layers() -> None:
    """Such as which of them stay as they are, by the numbers that they have in the checkpoint."""
    form = Quantization(ignore=("lm_head", "re:model.layers.2"))
    whole = replace(WHOLE, layers=layer_specs((None,) * 4), quantization=form)
    parts = [Share.of_rank(rank, 1, 2).part(whole) for rank in (1, 0)]
    forms = {name: part.form(name) for part in parts for name, *_ in part.linears()}
    assert forms == {name: whole.form(name) for name, *_ in whole.linears()}
    counted_twice = whole.embedding_bytes + whole.head_bytes + whole.hidden_size * whole.dtype_bytes
    assert sum(part.weight_bytes for part in parts) == whole.weight_bytes + counted_twice
    assert parts[1].weight_bytes > parts[0].weight_bytes


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_another_stage_holds_is_not_missed(is_tied: bool) -> None:
    config = replace(WHOLE, layers=layer_specs((None,) * 3), tie_embeddings=is_tied)
    last, middle, first = (Share.of_rank(rank, 1, 3) for rank in range(3))
    held = {
        share: [
            name
            for name in ("embed_tokens", "layers.0.x", "layers.1.x", "layers.2.x", "layers.3.x", "norm")
            if not share.is_elsewhere(f"model.{name}.weight", config)
        ]
        for share in (first, middle, last)
    }
    # A fourth layer is nobody's, and so a surplus that is named
    assert held[first] == ["embed_tokens", "layers.0.x", "layers.3.x", "norm"]
    assert held[middle] == ["layers.1.x", "layers.3.x", "norm"]
    assert held[last] == [*(["embed_tokens"] if is_tied else []), "layers.2.x", "layers.3.x", "norm"]
    # A name with a digit that is no number names no layer
    assert not first.is_elsewhere("model.layers.².mlp.up_proj.weight", config)
    assert [each.is_elsewhere("lm_head.weight", config) for each in (first, middle, last)] == [
        True,
        True,
        False,
    ]


def test_ranks_that_keep_equal_pages_say_so_and_no_others() -> None:
    """Against the rows of a key projection that each rank reads, and the places of a divided page."""
    for num_kv_heads, contexts, stages in ((1, 1, 1), (2, 2, 1), (4, 1, 2), (1, 4, 1)):
        whole = replace(WHOLE, num_heads=4, num_kv_heads=num_kv_heads)
        ranks = [Share.of_rank(rank, 4, stages, contexts=contexts) for rank in range(4 * stages)]
        held = [
            (
                share.slices("model.layers.0.self_attn.k_proj.weight", whole),
                share.tensor % contexts,
                share.stage,
            )
            for share in ranks
        ]
        for one, its in zip(ranks, held):
            equal = [one.cached(whole) == other.cached(whole) for other in ranks]
            assert equal == [its == each for each in held]
