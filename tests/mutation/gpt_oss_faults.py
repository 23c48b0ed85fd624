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

GPT_OSS_FAULTS = (
    Fault(
        "gate_and_up_as_halves",
        STACKED,
        "rows[turn :: len(places)]",
        "rows.chunk(len(places))[turn]",
        "as all other checkpoints have them that join the two",
    ),
    Fault(
        "high_half_of_a_byte_first",
        STACKED,
        "(blocks & 15, blocks >> 4)",
        "(blocks >> 4, blocks & 15)",
        "the low half is the first number",
    ),
    Fault(
        "negative_numbers_without_their_sign",
        STACKED,
        "(-each for each in E2M1)",
        "E2M1",
        "the highest bit of four is the sign",
    ),
    Fault(
        "bias_of_a_float_in_scales",
        STACKED,
        "EXPONENT_BIAS = 127",
        "EXPONENT_BIAS = 128",
        "every expert is half as large",
    ),
    Fault(
        "scales_of_another_file_read_first",
        STACKED,
        "blocks, scales = self.found.pop(BLOCKS), self.found.pop(SCALES)",
        "blocks, scales = (self.found.pop(each) for each in list(self.found))",
        "where blocks come last, they are taken for scales",
    ),
    Fault(
        "gate_without_its_limit",
        OPS,
        "gate.clamp(max=limit), up.clamp",
        "gate, up.clamp",
        "no published weight shows it in a short answer",
    ),
    Fault(
        "up_without_its_one",
        OPS,
        "return (up + 1) * (gate",
        "return up * (gate",
        "as in SwiGLU",
    ),
    Fault(
        "halves_clipped_by_turns",
        ON_NPU,
        "npu_clipped_swiglu(gate_up.contiguous(), interleaved=False, **how)",
        "npu_clipped_swiglu(gate_up.contiguous(), **how)",
        "the operator takes gate and up by turns, as a checkpoint has them, unless it is told",
    ),
    Fault(
        "stand_in_clips_both_sides_of_a_gate",
        ACTIVATION,
        'gate.clamp(max=call["limit"]), up',
        'gate.clamp(-call["limit"], call["limit"]), up',
        "a gate may be as low as it is",
    ),
    Fault(
        "router_without_its_bias",
        OPS,
        "scores = F.linear(x.float(), router, bias)",
        "scores = F.linear(x.float(), router)",
        "some tokens choose other experts",
    ),
    Fault(
        "window_on_the_other_layers",
        GPT_OSS,
        '"full" if layer % 2 else "sliding"',
        '"sliding" if layer % 2 else "full"',
        "the first layer has a window",
    ),
)
