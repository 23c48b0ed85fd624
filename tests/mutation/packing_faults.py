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

PACKING_FAULTS = {
    "left_out_wherever_it_stands_in_a_name": Fault(
        PACKING + "::_awq",
        'f"re:(?:{each}){BOUNDARY}"',
        'f"re:.*{each}"',
        "a router that is left as it is takes every gate_proj along",
    ),
    "left_out_from_its_beginning_alone": Fault(
        PACKING + "::_awq",
        "ignored_ends=left_out",
        "",
        "the routers of all layers, named by their last part, should be packed",
    ),
    "nibbles_the_other_way_round": Fault(
        UNPACKING + "::Unpacking._values",
        "(octets & 15, octets >> 4)",
        "(octets >> 4, octets & 15)",
        "neighbours change places",
    ),
    "order_of_a_word_turned_over": Fault(
        PACKING,
        "(0, 4, 1, 5, 2, 6, 3, 7)",
        "(0, 2, 4, 6, 1, 3, 5, 7)",
        "which output a place holds is not the place that an output has",
    ),
    "zero_not_less_one": Fault(
        PACKING + "::_gptq", 'kind == "gptq"', 'kind == "gptq_v2"', "every weight is off by a step"
    ),
    "one_added_to_the_lowest_zero": Fault(
        UNPACKING + "::Unpacking._apart",
        "sum(1 << shift for shift in range(0, 32, form.bits))",
        "1",
        "seven outputs of eight are off by a step",
    ),
    "group_counted_from_the_rank_s_first_input": Fault(
        UNPACKING + "::Unpacking._groups",
        "torch.arange(self.columns.start, self.columns.stop)",
        "torch.arange(self.columns.stop - self.columns.start)",
        "the second rank's weights have the first one's scales",
    ),
    "group_of_an_input_passed_over": Fault(
        UNPACKING + "::Unpacking._groups",
        "found[self.layout.group].long()",
        "torch.arange(len(found[self.layout.group])) // (self.form.group_size or self.shape[1])",
        "inputs that were reordered have the scales of others",
    ),
    "middle_of_another_range": Fault(
        UNPACKING + "::Unpacking.weight",
        "2 ** (self.form.bits - 1)",
        "2**self.form.bits // 2 - 1",
        "symmetric weights are off by a step",
    ),
    "words_cut_as_values": Fault(
        UNPACKING + "::Unpacking._values",
        "cut.start % count",
        "0",
        "a rank whose part begins within a word reads its neighbour's rows",
    ),
    "bias_passed_over": Fault(
        UNPACKING + "::Unpacking._apart",
        "BIAS in found and bool(found[BIAS].any())",
        "False",
        "a bias of the checkpoint is silently left out",
    ),
    "order_need_not_be_there": Fault(
        PACKING + "::_gptq",
        "desc_act and size is not None",
        "False",
        "where g_idx is lost, inputs get the scales of others and nobody is told",
    ),
    "mapped_part_kept": Fault(
        PARTS + "::Gathering.take",
        "len(self.found) + 1",
        "len(self.found) + 2",
        "a weight is made before its last tensor has come",
    ),
    "scale_of_the_rows_before_their_order": Fault(
        PLACE + "::Place.fill",
        "self.rounding.linear.round_to(self.room[: len(tensor)], scale[: len(tensor)], numbers)",
        (
            "self.rounding.linear.round_to(self.room[: len(tensor)], scale[: len(tensor)].flip(0),"
            " numbers)\n"
            "scale.copy_(scale.flip(0))"
        ),
        "an output has the scale of another",
    ),
}
