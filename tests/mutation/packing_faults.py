"""Which faults are seeded in reading weights that are packed, or that become int8 as they come?"""

from __future__ import annotations

from tests.mutation.fault import Fault

PACKING, UNPACKING, PARTS = "models/packing.py", "models/unpacking.py", "models/stored_parts.py"
PLACE = "models/place.py"
PACKED_TESTS = ("tests/models/test_packed_weights.py",)
PACKING_TESTS_OF = {
    **dict.fromkeys((PACKING, UNPACKING), PACKED_TESTS),
    PARTS: (*PACKED_TESTS, "tests/models/test_block_scales.py"),
    PLACE: tuple(
        f"tests/models/test_{name}.py"
        for name in ("shared_weights", "quantization", "stored_otherwise", "block_scales", "mixture")
    ),
}

PACKING_FAULTS = (
    Fault(
        "left_out_wherever_it_stands_in_a_name",
        PACKING,
        'ignored([f"re:(?:{each}){BOUNDARY}" for each in left_out], key)',
        'ignored([f"re:.*{each}" for each in left_out], key)',
        "a router that is left as it is takes every gate_proj along",
    ),
    Fault(
        "left_out_from_its_beginning_alone",
        PACKING,
        "ignore=ignore, ignored_ends=left_out",
        "ignore=ignore",
        "the routers of all layers, named by their last part, should be packed",
    ),
    Fault(
        "nibbles_the_other_way_round",
        UNPACKING,
        "(octets & 15, octets >> 4)",
        "(octets >> 4, octets & 15)",
        "neighbours change places",
    ),
    Fault(
        "order_of_a_word_turned_over",
        PACKING,
        "(0, 4, 1, 5, 2, 6, 3, 7)",
        "(0, 2, 4, 6, 1, 3, 5, 7)",
        "which output a place holds is not the place that an output has",
    ),
    Fault(
        "zero_not_less_one",
        PACKING,
        'less_one=kind == "gptq"',
        'less_one=kind == "gptq_v2"',
        "every weight is off by a step",
    ),
    Fault(
        "one_added_to_the_lowest_zero",
        UNPACKING,
        "sum(1 << shift for shift in range(0, 32, form.bits))",
        "1",
        "seven outputs of eight are off by a step",
    ),
    Fault(
        "group_counted_from_the_rank_s_first_input",
        UNPACKING,
        "torch.arange(self.columns.start, self.columns.stop) // size",
        "torch.arange(self.columns.stop - self.columns.start) // size",
        "the second rank's weights have the first one's scales",
    ),
    Fault(
        "group_of_an_input_passed_over",
        UNPACKING,
        "groups = found[self.layout.group].long()",
        "groups = torch.arange(len(found[self.layout.group])) // (self.form.group_size or self.shape[1])",
        "inputs that were reordered have the scales of others",
    ),
    Fault(
        "middle_of_another_range",
        UNPACKING,
        "2 ** (self.form.bits - 1)",
        "2**self.form.bits // 2 - 1",
        "symmetric weights are off by a step",
    ),
    Fault(
        "words_cut_as_values",
        UNPACKING,
        "values.narrow(-1, cut.start % count, cut.stop - cut.start)",
        "values.narrow(-1, 0, cut.stop - cut.start)",
        "a rank whose part begins within a word reads its neighbour's rows",
    ),
    Fault(
        "bias_passed_over",
        UNPACKING,
        "if BIAS in found and bool(found[BIAS].any()):",
        "if False:",
        "a bias of the checkpoint is silently left out",
    ),
    Fault(
        "order_need_not_be_there",
        PACKING,
        "has_order = desc_act and size is not None",
        "has_order = False",
        "where g_idx is lost, inputs get the scales of others and nobody is told",
    ),
    Fault(
        "mapped_part_kept",
        PARTS,
        "if len(self.found) + 1 < count:",
        "if len(self.found) + 2 < count:",
        "a weight is made before its last tensor has come",
    ),
    Fault(
        "scale_of_the_rows_before_their_order",
        PLACE,
        "scale[: len(tensor)], numbers)\n",
        "scale[: len(tensor)].flip(0), numbers)\n            scale.copy_(scale.flip(0))\n",
        "an output has the scale of another",
    ),
)
