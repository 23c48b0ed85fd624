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

TENSOR_FAULTS = (
    Fault(
        "bias_of_every_rank",
        SHARE,
        "                return (slice(0, 0),)\n",
        "                return ()\n",
        "each rank brings the bias to a sum that is to have it once",
    ),
    Fault(
        "inner_rows_of_the_first_rank",
        SHARE,
        "                return (_equal(inner, rank, ranks),)\n",
        "                return (slice(0, inner // self.tensors),)\n",
        "gate and up of one rank are multiplied by down of another",
    ),
    Fault(
        "kv_heads_in_turn",
        SHARE,
        "first = self.tensor * config.num_kv_heads // self.tensors\n",
        "first = self.tensor * max(1, config.num_kv_heads // self.tensors) % config.num_kv_heads\n",
        "with fewer heads than ranks, query heads read the keys of another group",
    ),
    Fault(
        "ranks_refused_too_late",
        SHARE,
        "    return not (config.num_kv_heads % count and count % config.num_kv_heads)\n",
        "    return True\n",
        "a rank's query heads belong to a key-value head and a half",
    ),
    Fault(
        "tokens_rounded_down",
        SHARE,
        "        size = -(-config.vocab_size // self.tensors)\n",
        "        size = config.vocab_size // self.tensors\n",
        "the last tokens of an odd vocabulary are nowhere",
    ),
    Fault(
        "scale_of_the_part",
        LINEAR,
        "return self.group.all_reduce_max(largest)",
        "return largest",
        "int8 weights, and with them answers, change with the number of ranks",
    ),
    Fault(
        "first_token_of_a_rank_lost",
        DECODER,
        "(token_ids >= tokens.start)",
        "(token_ids > tokens.start)",
        "one token a rank has an embedding of zeros",
    ),
    Fault(
        "int8_parts_not_added",
        MLP,
        "            return self.group.all_reduce(self.part(x))\n",
        "            return self.part(x)\n",
        "what joins both products of an MLP in int8 goes past the sum",
    ),
    Fault(
        "logits_wider_than_the_vocabulary",
        PARTS,
        "[:, : self._vocab_size].contiguous()",
        "",
        "a token may be chosen that does not exist",
    ),
    Fault(
        "padding_among_the_logits",
        PARTS,
        "        own = own[:, : len(self._tokens)]\n",
        "",
        "where all logits are below zero, the best token is one that does not exist",
    ),
    Fault(
        "last_of_equal_tokens",
        PARTS,
        "tokens, MOST_TOKENS).amin(0)",
        "tokens, -1).amax(0)",
        "of equal logits, which bfloat16 has many of, ranks take another token than one rank does",
    ),
    Fault(
        "own_numbers_of_tokens",
        PARTS,
        "(at + self._tokens.start).float()",
        "at.float()",
        "a rank counts its tokens from its own first",
    ),
    Fault(
        "nan_of_another_rank",
        PARTS,
        "torch.where(is_finite | (logit == -torch.inf), logit, torch.inf)",
        "torch.where(is_finite, logit, -torch.inf)",
        "a row with a NaN on one rank gets a token of another",
    ),
    Fault(
        "logits_joined_for_the_best",
        RUNNER,
        "            if takes_best(batch.owners, self.slots):\n",
        "            if False:\n",
        "greedy steps bring the whole vocabulary together, of which nobody reads more than a token",
    ),
    Fault(
        "part_taken_for_the_whole",
        WEIGHTS,
        "sizes = {name: (outputs, inputs) for name, inputs, outputs in config.linears()}",
        "sizes = {name: (outputs, inputs) for name, inputs, outputs in decoder.part.linears()}",
        "a checkpoint of the right shapes is refused, and one of a part's shapes read",
    ),
    Fault(
        "padding_not_zero",
        PLACE,
        "room[len(tensor) :].zero_()\n",
        "room[len(tensor) :].fill_(1)\n",
        "ranks that have no bias bring what their memory held before",
    ),
    Fault(
        "tokens_kept_by_the_leader",
        RUNNER,
        "            self.decoder.group.broadcast(chosen.tokens)\n",
        "            pass\n",
        "where the host is ahead, other ranks compute the next step of tokens that nobody chose",
    ),
    Fault(
        "sum_in_place_of_the_largest",
        GROUP,
        "dist.all_reduce(x, dist.ReduceOp.MAX, group=self._ranks)",
        "dist.all_reduce(x, group=self._ranks)",
        "weights quantized at load use half of the range, or less",
    ),
    Fault(
        "weights_of_the_first_stage",
        WEIGHTS,
        "        parts[1] = str(int(parts[1]) + decoder.share.layers(decoder.config).start)\n",
        "        pass\n",
        "every stage draws the weights of the first",
    ),
    Fault(
        "weights_of_one_seed",
        WEIGHTS,
        "        generator.manual_seed(_seed_of(decoder, name, seed))\n",
        "        generator.manual_seed(seed)\n",
        "all layers have the same weights",
    ),
)
