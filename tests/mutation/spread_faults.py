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

SPREAD_FAULTS = {
    "experts_of_the_next_part": Fault(
        SHARE + "::Share.places",
        "self.tensor // self.of_an_expert[1] * count",
        "(self.tensor // self.of_an_expert[1] + 1) % self.experts * count + count // 2",
        "an expert is on two parts of the ranks, and another on none",
    ),
    "parts_taken_in_turn": Fault(
        SHARE + "::Share.places",
        "self.tensor // self.of_an_expert[1]",
        "self.tensor % self.experts",
        "ranks that divide an expert are not those that find its largest together",
    ),
    "experts_divided_by_all_ranks": Fault(
        SHARE + "::Share.slices",
        "inner, (rank, ranks) = config.mixture.inner_size, self.of_an_expert",
        "inner = config.mixture.inner_size",
        "a rank reads a slice of its whole experts",
    ),
    "ids_of_experts_not_mapped": Fault(
        MIXTURE + "::Mixture.forward",
        "self._numbers is not None",
        "False",
        "every rank computes the rows of the first rank's experts",
    ),
    "the_inverse_of_a_placement": Fault(
        MIXTURE + "::Mixture.__init__",
        "order.argsort()",
        "order",
        "rows go to the expert whose place is their expert's number",
    ),
    "placement_of_the_first_layers": Fault(
        SHARE + "::Share.part",
        "mixture.placement[layers.start : layers.stop]",
        "mixture.placement[: len(layers)]",
        "a later stage computes with experts where an earlier one has them",
    ),
    "every_layer_placed_as_the_first": Fault(
        MIXTURE_CONFIG + "::MixtureConfig.places",
        "self.placement[layer]",
        "self.placement[0]",
        "an expert of one layer is looked for where another layer has it",
    ),
    "largest_of_other_experts": Fault(
        GROUP + "::sharing_experts",
        "return group.few",
        "return group",
        "an expert's int8 weights hang on those of others",
    ),
    "rows_that_no_product_wrote": Fault(
        NPU + "::mixture",
        "num_held < num_experts",
        "False",
        "what memory held before is added to the tokens of other ranks' experts",
    ),
    "most_loaded_rank_first": Fault(
        PLACEMENT + "::balanced", "min", "max", "the experts that are chosen most lie together"
    ),
    "ranks_of_any_size": Fault(
        PLACEMENT + "::balanced",
        "(each for each in range(parts) if len(held[each]) < room)",
        "(each for each in range(parts))",
        "a rank holds more experts than it has room for",
    ),
    "an_expert_on_two_ranks": Fault(
        PLACEMENT + "::read",
        "sorted(layer) != list(range(count if has_experts else 0))",
        "len(layer) != (count if has_experts else 0)",
        "a placement leaves out an expert, whose tokens get nothing of it",
    ),
    "placements_compared_by_their_path": Fault(
        RANK_PROCESS + "::common",
        'sections["parallel"]["placement"] = digest',
        "assert digest",
        "two machines take two placements, and some experts are nowhere",
    ),
    "choices_counted_for_the_ranks_own": Fault(
        MIXTURE + "::Mixture.forward",
        "self.counts.index_add_(0, chosen.flatten(), one[:, None].expand_as(chosen).flatten())",
        (
            "self.counts.index_add_(0, chosen[:, :1].expand_as(chosen).flatten(), one[:,"
            " None].expand_as(chosen).flatten())"
        ),
        "only a token's best expert is counted",
    ),
    "padding_counted": Fault(
        GRAPHS + "::DecodeGraphs._step",
        "write_index >= self.slots.page_size",
        "write_index >= 0",
        "the experts of the null token seem to be chosen most",
    ),
    "counts_of_the_neighbouring_layer": Fault(
        COUNTS + "::ExpertCounts.__init__",
        "self._layers",
        "self._layers[::-1]",
        "a layer's experts are placed by another layer's choices",
    ),
    "counts_that_begin_again": Fault(
        COUNTS + "::ExpertCounts.read",
        "now - self._last",
        "now.astype(np.int64) - self._last",
        "after 4e9 tokens of an expert, it seems to be chosen less than never",
    ),
    "parts_that_do_not_divide": Fault(
        SHARE + "::check_experts",
        "tensors % each == 0 == total % each",
        "tensors % each == 0",
        "some experts are on no rank",
    ),
    "others_experts_known_by_any_number": Fault(
        SHARE + "::Share.is_others_expert",
        "number.isdigit() and int(number) < mixture.num_experts",
        "number.isdigit()",
        "an expert that the model does not have is passed over",
    ),
}
