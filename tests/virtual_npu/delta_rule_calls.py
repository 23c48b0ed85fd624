"""Random right calls, and wrong ones, of the operators of the gated delta rule; see right_calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.virtual_npu.calls import Arguments, pick
from tests.virtual_npu.wrong import Change, Wrong, cut, put, spoil, strided, to
from virtual_npu.contract import Conditions
from virtual_npu.simulated_products import A2, A3


def _shared(rng: np.random.Generator, lens: list[int], key_width: int, width: int) -> Arguments:
    tokens, key_heads = sum(lens), int(rng.integers(1, 4))
    heads = key_heads * int(rng.integers(1, 4))

    def normal(*sizes: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((tokens, *sizes), dtype=np.float32))

    def unit() -> Tensor:
        return torch.nn.functional.normalize(normal(key_heads, key_width), dim=-1).bfloat16()

    return {
        "query": unit(),
        "key": unit(),
        "value": normal(heads, width).bfloat16(),
        "beta": normal(heads).sigmoid().bfloat16(),
        "scale": key_width**-0.5,
        "actual_seq_lengths": torch.tensor(lens, dtype=torch.int32),
        "g": -normal(heads).abs(),
    }


def recurrent(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Decodes, some with drafts of which some were accepted."""
    lens = rng.integers(1, 9, int(rng.integers(1, 5))).tolist()
    made = _shared(rng, lens, *pick(rng, (16, 24), (128, 128), (256, 8)))
    tokens, heads, width = made["value"].shape
    blocks, key_width = tokens + int(rng.integers(3)), made["key"].shape[2]
    accepted = torch.tensor([rng.integers(1, each + 1) for each in lens]).int()
    made |= {
        "state": torch.randn(blocks, heads, width, key_width).bfloat16(),
        "ssm_state_indices": torch.from_numpy(rng.permutation(blocks)[:tokens].astype(np.int32)),
        "num_accepted_tokens": pick(rng, None, accepted),
    }
    return made, Conditions(product=pick(rng, A2, A3))


def _more_heads(count: int) -> Arguments:
    return {
        "value": torch.zeros(1, count, 128, dtype=torch.bfloat16),
        "beta": torch.zeros(1, count, dtype=torch.bfloat16),
        "g": None,
        "query": torch.zeros(1, 1, 128, dtype=torch.bfloat16),
        "key": torch.zeros(1, 1, 128, dtype=torch.bfloat16),
        "actual_seq_lengths": torch.ones(1, dtype=torch.int32),
    }


def _of_some_heads(call: Arguments) -> Arguments:
    """Three heads of keys, of which the values have one head more."""
    value = call["value"][:, :1].expand(-1, 4, -1).contiguous()
    keys = {name: call[name][:, :1].expand(-1, 3, -1).contiguous() for name in ("query", "key")}
    beta = call["beta"][:, :1].expand(-1, 4).contiguous()
    name = "state" if "state" in call else "initial_state"
    state = call[name][:, :1].expand(-1, 4, -1, -1).contiguous()
    return {**keys, "value": value, "beta": beta, name: state, "g": None}


def _lens(change: Callable[[Tensor], Tensor]) -> Change:
    return to("actual_seq_lengths", change)


def _index(block: int) -> Change:
    return to("ssm_state_indices", lambda indices: spoil(indices, 0, block))


_BOTH = [
    Wrong("given", put(beta=None), "beta", "None"),
    Wrong("given", put(actual_seq_lengths=None), "actual_seq_lengths", "None"),
    Wrong("dtype", to("value", Tensor.half), "value", "float16"),
    Wrong("dtype", to("beta", Tensor.float), "beta", "float32"),
    Wrong("axes", to("query", lambda query: query[0]), "query", "bfloat16 ("),
    Wrong("axes", cut("key"), "query", "tokens of"),
    Wrong("heads", _of_some_heads, "value", "4 heads over 3"),
    Wrong("contiguous", to("value", strided), "value", "strided"),
    Wrong(
        "lengths", to("actual_seq_lengths", lambda lens: spoil(lens, 0, 0)), "actual_seq_lengths", "with 0"
    ),
]
RECURRENT = [
    *_BOTH,
    Wrong("given", put(ssm_state_indices=None), "ssm_state_indices", "None"),
    Wrong("channels", put(gk=torch.zeros(1, 1, 128)), "gk", "float32 (1, 1, 128)"),
    Wrong("dtype", to("state", Tensor.half), "state", "float16"),
    Wrong("blocks", to("state", lambda state: state[:1]), "state", "1 blocks for"),
    Wrong("lengths", to("actual_seq_lengths", lambda lens: lens + 8), "actual_seq_lengths", "one with "),
    Wrong("indices", _index(999), "ssm_state_indices", "block 999"),
    Wrong("indices", _index(-1), "ssm_state_indices", "block -1"),
    *(
        Wrong("accepted", to("num_accepted_tokens", change), "num_accepted_tokens", "for lengths")
        for change in (lambda each: each * 0, lambda each: each + 8)
    ),
]
CHUNK = [
    *_BOTH,
    Wrong("given", put(initial_state=None), "initial_state", "None"),
    Wrong("dtype", to("initial_state", Tensor.float), "initial_state", "float32"),
    Wrong("axes", cut("initial_state"), "initial_state", "tokens of"),
    Wrong(
        "heads",
        lambda _: _more_heads(65) | {"initial_state": torch.zeros(1, 65, 128, 128, dtype=torch.bfloat16)},
        "value",
        "65 heads",
    ),
    Wrong(
        "heads",
        lambda call: {
            "value": call["value"][..., :64].contiguous(),
            "initial_state": call["initial_state"][:, :, :64].contiguous(),
        },
        "value",
        "one of width 64",
    ),
    Wrong("lengths", to("actual_seq_lengths", lambda lens: lens + 1), "actual_seq_lengths", "tokens"),
]
