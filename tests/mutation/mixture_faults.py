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

MIXTURE_FAULTS = {
    "weights_not_normalised": Fault(
        REFERENCE + "::Ops._shares",
        "config.normalizes",
        "not config.normalizes",
        "a token's experts add up to less than the model was trained with",
    ),
    "router_in_the_type_of_the_model": Fault(
        REFERENCE + "::Ops.route",
        "F.linear(x.float(), router, bias)",
        "F.linear(x, router.to(x.dtype), bias).float()",
        "experts that score nearly alike change places by rounding",
    ),
    "infinity_of_another_token": Fault(
        REFERENCE + "::Ops.mixture",
        "part.where(is_chosen.any(-1, keepdim=True), 0)",
        "part",
        "an expert's overflow on tokens that did not choose it spoils them",
    ),
    "weights_in_the_order_of_tokens": Fault(
        CPU + "::CpuOps.mixture",
        "weights.flatten()[order, None]",
        "weights.flatten()[:, None]",
        "a token's experts are weighed by what other tokens give to theirs",
    ),
    "first_row_of_every_expert": Fault(
        CPU + "::CpuOps.mixture", "first += count", "first += 0", "every expert computes the first rows"
    ),
    "tokens_of_one_choice": Fault(
        CPU + "::CpuOps.mixture",
        "order // chosen.shape[1]",
        "order % len(chosen)",
        "rows go back to other tokens",
    ),
    "joined_weights_of_another_choice": Fault(
        JOINED + "::mixture",
        "weights.to(x.dtype)",
        "weights.flip(-1).to(x.dtype)",
        "what the best expert made counts as much as the worst was to",
    ),
    "joined_weights_not_normalised": Fault(
        FUSED + "::NpuOps.route",
        "int(config.normalizes)",
        "0",
        "on an NPU a token's experts add up to less than the model was trained with",
    ),
    "scales_of_experts_in_float32": Fault(
        MIXTURE + "::Mixture.__init__",
        "torch.bfloat16",
        "torch.float32",
        "an NPU refuses the scales of experts beside a result in bfloat16",
    ),
    "rows_of_experts_not_quantised": Fault(
        JOINED + "::mixture", "1 if is_int8 else -1", "-1", "rows of the model's type meet weights in int8"
    ),
    "groups_share_the_first_scale": Fault(
        SWIGLU + "::_swiglu",
        "scale.repeat_interleave(counts, 0)",
        "scale[:1]",
        "the stand-in scales every expert's rows as the first expert's",
    ),
    "width_of_a_half_bounded": Fault(
        WIDTHS + "::fuses_gate",
        "2 * inner_size",
        "inner_size",
        "the tiling counts gate and up together, and refuses Mixtral's experts over two ranks",
    ),
    "width_of_no_step": Fault(
        WIDTHS + "::fuses_gate",
        "2 * inner_size <= MOST_GATED and inner_size % GATED_STEP == 0",
        "2 * inner_size <= MOST_GATED",
        "an NPU refuses experts of 96 columns",
    ),
    "wide_experts_scaled_in_float32": Fault(
        JOINED + "::gated_by_width",
        "gate_up.scale.to(down.scale.dtype)",
        "gate_up.scale",
        "a grouped product refuses scales in float32 beside a result in bfloat16",
    ),
    "wide_groups_pass": Fault(
        SWIGLU + "::_width",
        "columns > MOST_GROUPED or columns // 2 % GROUPED_STEP",
        "columns // 2 % GROUPED_STEP",
        "the stand-in computes experts that the tiling refuses",
    ),
    "experts_kept_beside_the_joined": Fault(
        MIXTURE + "::Mixture.pack",
        "self.experts, self._parts = nn.ModuleDict(), []",
        "pass",
        "every expert lies in the device's memory twice",
    ),
    "rows_of_experts_not_whole": Fault(
        GROUPED + "::_whole",
        "min(counts) < 0 or sum(counts) > rows",
        "min(counts) < 0",
        "rows that no expert computed pass for results",
    ),
    "offsets_of_experts_left_out": Fault(
        JOINED + "::joined",
        "_by_groups(offsets)",
        "torch.zeros_like(scale)",
        "weights of 4 bits are taken about the middle, whatever their zeros are",
    ),
    "first_group_of_experts_alone": Fault(
        JOINED + "::_by_groups",
        "made[:, 0].contiguous() if made.shape[1] == 1 else made",
        "made[:, 0].contiguous()",
        "all inputs of an expert are scaled as its first group",
    ),
    "biases_of_experts_left_out": Fault(
        JOINED + "::joined", '"bias"', '"biases"', "gpt-oss adds a bias to both products"
    ),
    "clamped_experts_gated_as_swiglu": Fault(
        JOINED + "::of_experts",
        "gated(gate_up.product(rows, counts))",
        "torch_npu.npu_swiglu(gate_up.product(rows, counts))",
        "joined experts of gpt-oss have a clamped gate",
    ),
    "groups_that_do_not_divide": Fault(
        GROUPED + "::_antiquant",
        "tuple(scale.shape) != wanted or scale.dtype != x.dtype or inner % max(1, groups)",
        "tuple(scale.shape) != wanted or scale.dtype != x.dtype",
        "an NPU refuses groups that do not divide the inputs",
    ),
    "offset_of_another_group": Fault(
        GROUPED + "::_widened",
        "(wide + offset) * scale",
        "wide * scale + offset",
        "an offset is added before it is scaled",
    ),
    "sparse_step_from_zero": Fault(
        EXPERTS_FILE + "::sparse_layers",
        "layer + 1",
        "layer",
        "the experts are looked for in the dense layers",
    ),
    "dense_layers_forgotten": Fault(
        EXPERTS_FILE + "::sparse_layers",
        "layer not in dense and (layer + 1) % step == 0",
        "(layer + 1) % step == 0",
        "a checkpoint with dense layers cannot be loaded",
    ),
    "up_and_down_exchanged": Fault(
        MIXTRAL + "::config",
        '("w1", "w3", "w2")',
        '("w1", "w2", "w3")',
        "Mixtral's tensors find no place, or another's",
    ),
    "idle_experts_counted": Fault(
        CONFIG + "::DecoderConfig.num_active_parameters",
        "self.num_parameters - self.num_mixtures * self._num_idle * self._expert_parameters",
        "self.num_parameters",
        "a token is said to be multiplied with all experts",
    ),
}
