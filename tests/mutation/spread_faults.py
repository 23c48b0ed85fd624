"""Which faults are seeded in experts that are spread over ranks?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.graph_faults import GRAPH_TESTS_OF
from tests.mutation.latent_faults import LATENT_TESTS_OF
from tests.mutation.mixture_faults import MIXTURE_TESTS_OF
from tests.mutation.rank_faults import RANK_TESTS_OF
from tests.mutation.tensor_faults import TENSOR_TESTS_OF

SHARE, MIXTURE, GROUP, NPU = (
    "models/share.py",
    "models/mixture.py",
    "models/group.py",
    "models/npu/grouped.py",
)
MIXTURE_CONFIG = "models/mixture_config.py"
PLACEMENT, RANK_PROCESS = "models/placement.py", "recipes/build/rank_process.py"
COUNTS, GRAPHS, COUNT_TESTS = (
    "models/expert_counts.py",
    "models/graphs.py",
    "tests/models/test_expert_counts.py",
)
PLACE_TESTS = "tests/scripts/test_place.py"
SPREAD_TESTS = "tests/models/test_spread_experts.py"
SPREAD_TESTS_OF = {
    MIXTURE_CONFIG: (SPREAD_TESTS,),
    PLACEMENT: (PLACE_TESTS,),
    COUNTS: (COUNT_TESTS,),
    GRAPHS: (COUNT_TESTS, *GRAPH_TESTS_OF[GRAPHS]),
    RANK_PROCESS: (PLACE_TESTS, *RANK_TESTS_OF.get(RANK_PROCESS, ())),
    **{file: (SPREAD_TESTS, COUNT_TESTS, *LATENT_TESTS_OF[file]) for file in (SHARE, MIXTURE)},
    GROUP: (SPREAD_TESTS, *TENSOR_TESTS_OF[GROUP]),
    NPU: (*MIXTURE_TESTS_OF[NPU], "tests/models/test_tensor_parallel_npu.py"),
}

SPREAD_FAULTS = (
    Fault(
        "experts_of_the_next_part",
        SHARE,
        "        first = self.tensor // self.of_an_expert[1] * count\n",
        "        first = (self.tensor // self.of_an_expert[1] + 1) % self.experts * count + count // 2\n",
        "an expert is on two parts of the ranks, and another on none",
    ),
    Fault(
        "parts_taken_in_turn",
        SHARE,
        "        first = self.tensor // self.of_an_expert[1] * count\n",
        "        first = self.tensor % self.experts * count\n",
        "ranks that divide an expert are not those that find its largest together",
    ),
    Fault(
        "experts_divided_by_all_ranks",
        SHARE,
        "inner, (rank, ranks) = config.mixture.inner_size, self.of_an_expert",
        "inner = config.mixture.inner_size",
        "a rank reads a slice of its whole experts",
    ),
    Fault(
        "ids_of_experts_not_mapped",
        MIXTURE,
        "        if self._numbers is not None:\n",
        "        if False:\n",
        "every rank computes the rows of the first rank's experts",
    ),
    Fault(
        "the_inverse_of_a_placement",
        MIXTURE,
        "self._numbers = order.argsort().int()",
        "self._numbers = order.int()",
        "rows go to the expert whose place is their expert's number",
    ),
    Fault(
        "placement_of_the_first_layers",
        SHARE,
        "placement=mixture.placement[layers.start : layers.stop]",
        "placement=mixture.placement[: len(layers)]",
        "a later stage computes with experts where an earlier one has them",
    ),
    Fault(
        "every_layer_placed_as_the_first",
        MIXTURE_CONFIG,
        "return self.placement[layer] if self.placement",
        "return self.placement[0] if self.placement",
        "an expert of one layer is looked for where another layer has it",
    ),
    Fault(
        "largest_of_other_experts",
        GROUP,
        "    return group.few\n",
        "    return group\n",
        "an expert's int8 weights hang on those of others",
    ),
    Fault(
        "rows_that_no_product_wrote",
        NPU,
        "    if num_held < num_experts:\n",
        "    if False:\n",
        "what memory held before is added to the tokens of other ranks' experts",
    ),
    Fault(
        "most_loaded_rank_first",
        PLACEMENT,
        "part = min((each",
        "part = max((each",
        "the experts that are chosen most lie together",
    ),
    Fault(
        "ranks_of_any_size",
        PLACEMENT,
        " if len(held[each]) < room)",
        ")",
        "a rank holds more experts than it has room for",
    ),
    Fault(
        "an_expert_on_two_ranks",
        PLACEMENT,
        "if sorted(layer) != list(range(count if has_experts else 0)):",
        "if len(layer) != (count if has_experts else 0):",
        "a placement leaves out an expert, whose tokens get nothing of it",
    ),
    Fault(
        "placements_compared_by_their_path",
        RANK_PROCESS,
        '        sections["parallel"]["placement"] = digest\n',
        "        assert digest\n",
        "two machines take two placements, and some experts are nowhere",
    ),
    Fault(
        "choices_counted_for_the_ranks_own",
        MIXTURE,
        "            self.counts.index_add_(0, chosen.flatten(), ",
        "            self.counts.index_add_(0, chosen[:, :1].expand_as(chosen).flatten(), ",
        "only a token's best expert is counted",
    ),
    Fault(
        "padding_counted",
        GRAPHS,
        "is_asked=(write_index >= self.slots.page_size).int()",
        "is_asked=(write_index >= 0).int()",
        "the experts of the null token seem to be chosen most",
    ),
    Fault(
        "counts_of_the_neighbouring_layer",
        COUNTS,
        "for each in self._layers if isinstance(each, Mixture)), self._rows):",
        "for each in self._layers[::-1] if isinstance(each, Mixture)), self._rows):",
        "a layer's experts are placed by another layer's choices",
    ),
    Fault(
        "counts_that_begin_again",
        COUNTS,
        "self._totals += now - self._last",
        "self._totals += now.astype(np.int64) - self._last",
        "after 4e9 tokens of an expert, it seems to be chosen less than never",
    ),
    Fault(
        "parts_that_do_not_divide",
        SHARE,
        "if tensors % each == 0 == total % each]",
        "if tensors % each == 0]",
        "some experts are on no rank",
    ),
    Fault(
        "others_experts_known_by_any_number",
        SHARE,
        "is_known = number.isdigit() and int(number) < mixture.num_experts\n",
        "is_known = number.isdigit()\n",
        "an expert that the model does not have is passed over",
    ),
)
