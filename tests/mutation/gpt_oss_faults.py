"""Which faults are seeded in what gpt-oss alone has?"""

from __future__ import annotations

from tests.mutation.aclop_faults import ACLOP_TESTS_OF
from tests.mutation.fault import Fault
from tests.mutation.latent_faults import LATENT_TESTS_OF

GPT_OSS, STACKED, OPS = "recipes/gpt_oss/model.py", "models/stacked_experts.py", "models/ops/reference.py"
ON_NPU, ACTIVATION = "models/ops/npu.py", "virtual_npu/operators/activation.py"
TESTS = ("tests/models/test_gpt_oss.py", "tests/models/test_stored_otherwise.py")
GPT_OSS_TESTS_OF = {
    GPT_OSS: TESTS,
    STACKED: TESTS,
    OPS: (*LATENT_TESTS_OF[OPS], *TESTS),
    ON_NPU: (*LATENT_TESTS_OF[ON_NPU], "tests/models/test_ops.py"),
    ACTIVATION: (*ACLOP_TESTS_OF[ACTIVATION], "tests/virtual_npu/test_references.py"),
}

GPT_OSS_FAULTS = {
    "gate_and_up_as_halves": Fault(
        STACKED + "::Stack.take_expert",
        "rows[turn :: len(places)]",
        "rows.chunk(len(places))[turn]",
        "as all other checkpoints have them that join the two",
    ),
    "high_half_of_a_byte_first": Fault(
        STACKED + "::unpacked",
        "(blocks & 15, blocks >> 4)",
        "(blocks >> 4, blocks & 15)",
        "the low half is the first number",
    ),
    "negative_numbers_without_their_sign": Fault(
        STACKED + "::unpacked", "(-each for each in E2M1)", "E2M1", "the highest bit of four is the sign"
    ),
    "bias_of_a_float_in_scales": Fault(
        STACKED, "EXPONENT_BIAS = 127", "EXPONENT_BIAS = 128", "every expert is half as large"
    ),
    "scales_of_another_file_read_first": Fault(
        STACKED + "::PackedStack.take",
        "self.found.pop(BLOCKS), self.found.pop(SCALES)",
        "(self.found.pop(each) for each in list(self.found))",
        "where blocks come last, they are taken for scales",
    ),
    "gate_without_its_limit": Fault(
        OPS + "::Ops.clamped_swiglu",
        "gate.clamp(max=limit)",
        "gate",
        "no published weight shows it in a short answer",
    ),
    "up_without_its_one": Fault(OPS + "::Ops.clamped_swiglu", "up + 1", "up", "as in SwiGLU"),
    "halves_clipped_by_turns": Fault(
        ON_NPU + "::NpuOps.clamped_swiglu",
        "interleaved=False",
        "",
        "the operator takes gate and up by turns, as a checkpoint has them, unless it is told",
    ),
    "stand_in_clips_both_sides_of_a_gate": Fault(
        ACTIVATION + "::_clipped",
        'gate.clamp(max=call["limit"])',
        'gate.clamp(-call["limit"], call["limit"])',
        "a gate may be as low as it is",
    ),
    "router_without_its_bias": Fault(
        OPS + "::Ops.route",
        "F.linear(x.float(), router, bias)",
        "F.linear(x.float(), router)",
        "some tokens choose other experts",
    ),
    "window_on_the_other_layers": Fault(
        GPT_OSS + "::config",
        '"full" if layer % 2 else "sliding"',
        '"sliding" if layer % 2 else "full"',
        "the first layer has a window",
    ),
}
