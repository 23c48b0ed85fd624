"""Which faults are seeded where adapters act?"""

from __future__ import annotations

from tests.mutation.fault import Fault

LOW_RANK, PLACES, FILES = "models/low_rank.py", "models/adapters.py", "models/adapter_files.py"
KNOWN, SERVED = "serving/adapters.py", "serving/served_adapters.py"
LOADS = "serving/engine/adapter_loads.py"
ADAPTER_TESTS_OF = {
    **dict.fromkeys((LOW_RANK, PLACES, FILES), ("tests/models/test_adapters.py",)),
    **dict.fromkeys((KNOWN, SERVED, LOADS), ("tests/serving/test_adapters.py",)),
}

ADAPTER_FAULTS = (
    Fault(
        "adapters_of_all_for_each",
        LOW_RANK,
        "self.is_other = numbers[:, None, None] != self._number_of",
        "self.is_other = (numbers[:, None, None] != self._number_of) & False",
        "each token gets the sum of all adapters that are there",
    ),
    Fault(
        "adapters_masked_by_products",
        LOW_RANK,
        "low.masked_fill_(is_other, 0)",
        "low.mul_(~is_other)",
        "infinity times zero is no number, and a neighbour's adapter spoils the answer",
    ),
    Fault(
        "adapter_of_the_step_before",
        LOW_RANK,
        "        self.is_other = None\n        if numbers",
        "        if numbers",
        "a step without adapters adds what the step before had",
    ),
    Fault(
        "adapter_left_in_its_place",
        LOW_RANK,
        "            room[len(read) :].zero_()\n",
        "",
        "what an adapter does not change still has the one that was unloaded",
    ),
    Fault(
        "adapter_packed_in_the_model_alone",
        LOW_RANK,
        "self._down, self._ups[index] = self.ops.pack_low_rank(down), self.ops.pack_low_rank(up)",
        "self._ups[index] = self.ops.pack_low_rank(up)",
        "where packing copies, steps multiply with what was there before",
    ),
    Fault(
        "adapter_without_its_scale",
        PLACES,
        "b * files.scale",
        "b",
        "alpha is taken for the rank",
    ),
    Fault(
        "adapter_in_the_order_of_its_file",
        PLACES,
        "b = b if room.order is None else b[room.order]",
        "b = b",
        "rows of heads that are held in another order get the values of others",
    ),
    Fault(
        "joined_adapter_from_its_first_row",
        PLACES,
        "b = b[first : first + self._sizes[room.name][1]][room.outputs]",
        "b = b[: self._sizes[room.name][1]][room.outputs]",
        "keys and values of a joined linear get the rows of its queries",
    ),
    Fault(
        "ranks_hold_the_whole_of_a",
        PLACES,
        "parts[at] = a[:, room.inputs],",
        "parts[at] = a[:, : room.low_rank.num_inputs],",
        "every rank multiplies its own inputs with the first rank's columns",
    ),
    Fault(
        "square_root_forgotten",
        FILES,
        "math.sqrt(rank) if self.is_root_scaled else rank",
        "rank",
        "rank-stabilised adapters add too little",
    ),
    Fault(
        "pages_of_an_adapter_shared_by_name",
        KNOWN,
        'return f"{salt}:adapter:{self.files.digest}"',
        'return f"{salt}:adapter:{self.name}"',
        "an adapter that is loaded again with other files finds the pages of the old one",
    ),
    Fault(
        "adapter_asked_for_before_it_is_there",
        SERVED,
        "                each.is_there = False\n                self._tell(each)",
        "                self._tell(each)",
        "a new engine answers for an adapter that it is still reading",
    ),
    Fault(
        "adapters_from_anywhere",
        SERVED,
        "if not folder.is_relative_to(self.root.resolve()):",
        "if False:",
        "a client learns what lies elsewhere on the server",
    ),
    Fault(
        "adapter_read_and_not_put",
        LOADS,
        "        self._adapters.put(message.number, parts)\n",
        "",
        "the adapter is there by name alone",
    ),
)
