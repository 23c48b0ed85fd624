"""Which faults are seeded in mixtures of experts?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.int8_faults import INT8_TESTS_OF
from tests.mutation.npu_faults import NPU_TESTS_OF

MIXTURE, CONFIG = "models/mixture.py", "models/config.py"
REFERENCE, CPU, MIXTRAL = "models/ops/reference.py", "models/ops/cpu.py", "recipes/mixtral/model.py"
EXPERTS_FILE = "models/huggingface_parts.py"
FUSED, GROUPED = "models/ops/npu.py", "virtual_npu/operators/grouped_matmul.py"
JOINED = "models/npu/grouped.py"
SWIGLU, WIDTHS = "virtual_npu/operators/int8_fusions.py", "devices/ascend_experts.py"
MIXTURE_TESTS = ("tests/models/test_mixture.py", "tests/models/test_share.py")
MIXTURE_TESTS_OF = {
    **dict.fromkeys((MIXTURE, REFERENCE, CPU, MIXTRAL), MIXTURE_TESTS),
    FUSED: (*NPU_TESTS_OF[FUSED], *MIXTURE_TESTS),
    JOINED: (
        *MIXTURE_TESTS,
        "tests/models/test_wide_experts.py",
        "tests/models/test_int4_experts.py",
        "tests/models/test_gpt_oss.py",
    ),
    GROUPED: ("tests/virtual_npu/test_wrong_calls.py", "tests/models/test_int4_experts.py"),
    SWIGLU: ("tests/models/test_wide_experts.py", "tests/virtual_npu/test_wrong_calls.py"),
    WIDTHS: ("tests/models/test_wide_experts.py",),
    EXPERTS_FILE: ("tests/models/test_huggingface.py", *MIXTURE_TESTS),
    CONFIG: (*INT8_TESTS_OF[CONFIG], *MIXTURE_TESTS),
}

MIXTURE_FAULTS = (
    Fault(
        "weights_not_normalised",
        REFERENCE,
        "if config.normalizes:",
        "if not config.normalizes:",
        "a token's experts add up to less than the model was trained with",
    ),
    Fault(
        "router_in_the_type_of_the_model",
        REFERENCE,
        "F.linear(x.float(), router, bias)",
        "F.linear(x, router.to(x.dtype), bias).float()",
        "experts that score nearly alike change places by rounding",
    ),
    Fault(
        "infinity_of_another_token",
        REFERENCE,
        "total += part.where(is_chosen.any(-1, keepdim=True), 0)",
        "total += part",
        "an expert's overflow on tokens that did not choose it spoils them",
    ),
    Fault(
        "weights_in_the_order_of_tokens",
        CPU,
        "weights.flatten()[order, None]",
        "weights.flatten()[:, None]",
        "a token's experts are weighed by what other tokens give to theirs",
    ),
    Fault(
        "first_row_of_every_expert",
        CPU,
        "                first += count\n",
        "                first += 0\n",
        "every expert computes the first rows",
    ),
    Fault(
        "tokens_of_one_choice",
        CPU,
        "order // chosen.shape[1]",
        "order % len(chosen)",
        "rows go back to other tokens",
    ),
    Fault(
        "joined_weights_of_another_choice",
        JOINED,
        "places, probs=weights.to(x.dtype)",
        "places, probs=weights.flip(-1).to(x.dtype)",
        "what the best expert made counts as much as the worst was to",
    ),
    Fault(
        "joined_weights_not_normalised",
        FUSED,
        "renorm=int(config.normalizes)",
        "renorm=0",
        "on an NPU a token's experts add up to less than the model was trained with",
    ),
    Fault(
        "scales_of_experts_in_float32",
        MIXTURE,
        "expert.down.scale_dtype = torch.bfloat16",
        "expert.down.scale_dtype = torch.float32",
        "an NPU refuses the scales of experts beside a result in bfloat16",
    ),
    Fault(
        "rows_of_experts_not_quantised",
        JOINED,
        "quant_mode=1 if is_int8 else -1",
        "quant_mode=-1",
        "rows of the model's type meet weights in int8",
    ),
    Fault(
        "groups_share_the_first_scale",
        SWIGLU,
        "scale = scale.repeat_interleave(counts, 0)",
        "scale = scale[:1]",
        "the stand-in scales every expert's rows as the first expert's",
    ),
    Fault(
        "width_of_a_half_bounded",
        WIDTHS,
        "2 * inner_size <= MOST_GATED",
        "inner_size <= MOST_GATED",
        "the tiling counts gate and up together, and refuses Mixtral's experts over two ranks",
    ),
    Fault(
        "width_of_no_step",
        WIDTHS,
        " and inner_size % GATED_STEP == 0",
        "",
        "an NPU refuses experts of 96 columns",
    ),
    Fault(
        "wide_experts_scaled_in_float32",
        JOINED,
        "scale=gate_up.scale.to(down.scale.dtype)",
        "scale=gate_up.scale",
        "a grouped product refuses scales in float32 beside a result in bfloat16",
    ),
    Fault(
        "wide_groups_pass",
        SWIGLU,
        "(columns > MOST_GROUPED or columns // 2 % GROUPED_STEP)",
        "columns // 2 % GROUPED_STEP",
        "the stand-in computes experts that the tiling refuses",
    ),
    Fault(
        "experts_kept_beside_the_joined",
        MIXTURE,
        "self.experts, self._parts = nn.ModuleDict(), []",
        "pass",
        "every expert lies in the device's memory twice",
    ),
    Fault(
        "rows_of_experts_not_whole",
        GROUPED,
        "if min(counts) < 0 or sum(counts) > rows:",
        "if min(counts) < 0:",
        "rows that no expert computed pass for results",
    ),
    Fault(
        "offsets_of_experts_left_out",
        JOINED,
        'beside["antiquant_offset"] = [_by_groups(offsets)]',
        'beside["antiquant_offset"] = [torch.zeros_like(scale)]',
        "weights of 4 bits are taken about the middle, whatever their zeros are",
    ),
    Fault(
        "first_group_of_experts_alone",
        JOINED,
        "return made[:, 0].contiguous() if made.shape[1] == 1 else made",
        "return made[:, 0].contiguous()",
        "all inputs of an expert are scaled as its first group",
    ),
    Fault(
        "biases_of_experts_left_out",
        JOINED,
        'beside["bias"] = [bias if',
        'beside["biases"] = [bias if',
        "gpt-oss adds a bias to both products",
    ),
    Fault(
        "clamped_experts_gated_as_swiglu",
        JOINED,
        "down.product(gated(gate_up.product(rows, counts)), counts)",
        "down.product(torch_npu.npu_swiglu(gate_up.product(rows, counts)), counts)",
        "joined experts of gpt-oss have a clamped gate",
    ),
    Fault(
        "groups_that_do_not_divide",
        GROUPED,
        "scale.dtype != x.dtype or inner % max(1, groups)",
        "scale.dtype != x.dtype",
        "an NPU refuses groups that do not divide the inputs",
    ),
    Fault(
        "offset_of_another_group",
        GROUPED,
        "((wide + offset) * scale).to(",
        "(wide * scale + offset).to(",
        "an offset is added before it is scaled",
    ),
    Fault(
        "sparse_step_from_zero",
        EXPERTS_FILE,
        "(layer + 1) % step == 0",
        "layer % step == 0",
        "the experts are looked for in the dense layers",
    ),
    Fault(
        "dense_layers_forgotten",
        EXPERTS_FILE,
        "layer not in dense and ",
        "",
        "a checkpoint with dense layers cannot be loaded",
    ),
    Fault(
        "up_and_down_exchanged",
        MIXTRAL,
        '("w1", "w3", "w2")',
        '("w1", "w2", "w3")',
        "Mixtral's tensors find no place, or another's",
    ),
    Fault(
        "idle_experts_counted",
        CONFIG,
        "return self.num_parameters - self.num_mixtures * self._num_idle * self._expert_parameters",
        "return self.num_parameters",
        "a token is said to be multiplied with all experts",
    ),
)
