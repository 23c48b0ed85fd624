"""Which faults are seeded in what tensor ranks hold, read and add up?"""

from __future__ import annotations

from tests.mutation.cache_faults import RUNNER
from tests.mutation.fault import Fault
from tests.mutation.packing_faults import PLACE

SHARE, DECODER, LINEAR, MLP, WEIGHTS, GROUP = (
    "models/share.py",
    "models/decoder.py",
    "models/linear.py",
    "models/mlp.py",
    "models/weights.py",
    "models/group.py",
)
PARTS = "models/logit_parts.py"
TENSOR_TESTS = tuple(
    f"tests/models/test_{name}.py"
    for name in ("share", "shared_weights", "random_stages", "random_shares", "tensor_parallel")
)
TENSOR_TESTS_OF = {
    **dict.fromkeys((SHARE, LINEAR, WEIGHTS), TENSOR_TESTS),
    GROUP: ("tests/models/test_stage_runner.py", *TENSOR_TESTS),
    PARTS: ("tests/models/test_logit_parts.py",),
    DECODER: (*TENSOR_TESTS, "tests/models/test_eagle3.py"),
}

TENSOR_FAULTS = {
    "bias_of_every_rank": Fault(
        SHARE + "::Share.slices",
        "(slice(0, 0),)",
        "()",
        "each rank brings the bias to a sum that is to have it once",
    ),
    "inner_rows_of_the_first_rank": Fault(
        SHARE + "::Share.slices",
        "_equal(inner, rank, ranks)",
        "slice(0, inner // self.tensors)",
        "gate and up of one rank are multiplied by down of another",
    ),
    "kv_heads_in_turn": Fault(
        SHARE + "::Share._kv_heads",
        "self.tensor * config.num_kv_heads // self.tensors",
        "self.tensor * max(1, config.num_kv_heads // self.tensors) % config.num_kv_heads",
        "with fewer heads than ranks, query heads read the keys of another group",
    ),
    "ranks_refused_too_late": Fault(
        SHARE + "::_can_share",
        "not (config.num_kv_heads % count and count % config.num_kv_heads)",
        "True",
        "a rank's query heads belong to a key-value head and a half",
    ),
    "tokens_rounded_down": Fault(
        SHARE + "::Share.tokens",
        "-(-config.vocab_size // self.tensors)",
        "config.vocab_size // self.tensors",
        "the last tokens of an odd vocabulary are nowhere",
    ),
    "scale_of_the_part": Fault(
        LINEAR + "::SummedLinear.largest",
        "self.group.all_reduce_max(largest)",
        "largest",
        "int8 weights, and with them answers, change with the number of ranks",
    ),
    "first_token_of_a_rank_lost": Fault(
        DECODER + "::Decoder._embedding_rows",
        "token_ids >= tokens.start",
        "token_ids > tokens.start",
        "one token a rank has an embedding of zeros",
    ),
    "int8_parts_not_added": Fault(
        MLP + "::MLP.forward",
        "self.group.all_reduce(self.part(x))",
        "self.part(x)",
        "what joins both products of an MLP in int8 goes past the sum",
    ),
    "logits_wider_than_the_vocabulary": Fault(
        PARTS + "::LogitParts.joined",
        "torch.cat(parts, dim=-1)[:, : self._vocab_size].contiguous()",
        "torch.cat(parts, dim=-1)",
        "a token may be chosen that does not exist",
    ),
    "padding_among_the_logits": Fault(
        PARTS + "::LogitParts.own_best",
        "own = own[:, : len(self._tokens)]",
        "",
        "where all logits are below zero, the best token is one that does not exist",
    ),
    "last_of_equal_tokens": Fault(
        PARTS + "::LogitParts.greedy",
        "torch.where(logits == best, tokens, MOST_TOKENS).amin(0)",
        "torch.where(logits == best, tokens, -1).amax(0)",
        "of equal logits, which bfloat16 has many of, ranks take another token than one rank does",
    ),
    "own_numbers_of_tokens": Fault(
        PARTS + "::LogitParts.own_best",
        "at + self._tokens.start",
        "at",
        "a rank counts its tokens from its own first",
    ),
    "nan_of_another_rank": Fault(
        PARTS + "::LogitParts.own_best",
        "torch.where(is_finite | (logit == -torch.inf), logit, torch.inf)",
        "torch.where(is_finite, logit, -torch.inf)",
        "a row with a NaN on one rank gets a token of another",
    ),
    "logits_joined_for_the_best": Fault(
        RUNNER + "::ModelRunner._chosen",
        "takes_best(batch.owners, self.slots)",
        "False",
        "greedy steps bring the whole vocabulary together, of which nobody reads more than a token",
    ),
    "part_taken_for_the_whole": Fault(
        WEIGHTS + "::placed",
        "(outputs, inputs)",
        "(held.get(name, outputs), inputs)",
        "a checkpoint of the right shapes is refused, and one of a part's shapes read",
    ),
    "padding_not_zero": Fault(
        PLACE + "::Place.fill",
        "room[len(tensor) :].zero_()",
        "room[len(tensor) :].fill_(1)",
        "ranks that have no bias bring what their memory held before",
    ),
    "tokens_kept_by_the_leader": Fault(
        RUNNER + "::ModelRunner.start",
        "self.decoder.group.broadcast(chosen.tokens)",
        "pass",
        "where the host is ahead, other ranks compute the next step of tokens that nobody chose",
    ),
    "sum_in_place_of_the_largest": Fault(
        GROUP + "::Group.all_reduce_max",
        "dist.all_reduce(x, dist.ReduceOp.MAX, group=self._ranks)",
        "dist.all_reduce(x, group=self._ranks)",
        "weights quantized at load use half of the range, or less",
    ),
    "weights_of_the_first_stage": Fault(
        WEIGHTS + "::_seed_of",
        "parts[1] = str(int(parts[1]) + decoder.share.layers(decoder.config).start)",
        "pass",
        "every stage draws the weights of the first",
    ),
    "weights_of_one_seed": Fault(
        WEIGHTS + "::random", "_seed_of(decoder, name, seed)", "seed", "all layers have the same weights"
    ),
}
