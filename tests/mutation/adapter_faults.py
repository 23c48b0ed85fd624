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

ADAPTER_FAULTS = {
    "adapters_of_all_for_each": Fault(
        LOW_RANK + "::AdapterRooms.choose",
        "numbers[:, None, None] != self._number_of",
        "(numbers[:, None, None] != self._number_of) & False",
        "each token gets the sum of all adapters that are there",
    ),
    "adapters_masked_by_products": Fault(
        LOW_RANK + "::LowRank.add",
        "low.masked_fill_(is_other, 0)",
        "low.mul_(~is_other)",
        "infinity times zero is no number, and a neighbour's adapter spoils the answer",
    ),
    "adapter_of_the_step_before": Fault(
        LOW_RANK + "::AdapterRooms.choose",
        "self.is_other = None",
        "",
        "a step without adapters adds what the step before had",
    ),
    "adapter_left_in_its_place": Fault(
        LOW_RANK + "::LowRank.put",
        "room[len(read) :].zero_()",
        "",
        "what an adapter does not change still has the one that was unloaded",
    ),
    "adapter_packed_in_the_model_alone": Fault(
        LOW_RANK + "::LowRank.put",
        "self._down, self._ups[index] = self.ops.pack_low_rank(down), self.ops.pack_low_rank(up)",
        "self._ups[index] = self.ops.pack_low_rank(up)",
        "where packing copies, steps multiply with what was there before",
    ),
    "adapter_without_its_scale": Fault(
        PLACES + "::Adapters.read", "b * files.scale_of(stored)", "b", "alpha is taken for the rank"
    ),
    "adapter_in_the_order_of_its_file": Fault(
        PLACES + "::Adapters.read",
        "b if room.order is None else b[room.order]",
        "b",
        "rows of heads that are held in another order get the values of others",
    ),
    "joined_adapter_from_its_first_row": Fault(
        PLACES + "::Adapters.read",
        "b[first : first + self._sizes[room.name][1]]",
        "b[: self._sizes[room.name][1]]",
        "keys and values of a joined linear get the rows of its queries",
    ),
    "ranks_hold_the_whole_of_a": Fault(
        PLACES + "::Adapters.read",
        "a[:, room.inputs]",
        "a[:, : room.low_rank.num_inputs]",
        "every rank multiplies its own inputs with the first rank's columns",
    ),
    "square_root_forgotten": Fault(
        FILES + "::AdapterFiles.scale_of",
        "math.sqrt(rank) if self.is_root_scaled else rank",
        "rank",
        "rank-stabilised adapters add too little",
    ),
    "pages_of_an_adapter_shared_by_name": Fault(
        KNOWN + "::NamedAdapter.salted",
        'f"{salt}:adapter:{self.files.digest}"',
        'f"{salt}:adapter:{self.name}"',
        "an adapter that is loaded again with other files finds the pages of the old one",
    ),
    "adapter_asked_for_before_it_is_there": Fault(
        SERVED + "::ServedAdapters.begin",
        "each.is_there = False",
        "",
        "a new engine answers for an adapter that it is still reading",
    ),
    "adapters_from_anywhere": Fault(
        SERVED + "::ServedAdapters._folder",
        "not folder.is_relative_to(self.root.resolve())",
        "False",
        "a client learns what lies elsewhere on the server",
    ),
    "adapter_read_and_not_put": Fault(
        LOADS + "::AdapterLoads._put",
        "self._adapters.put(message.number, parts)",
        "",
        "the adapter is there by name alone",
    ),
}
