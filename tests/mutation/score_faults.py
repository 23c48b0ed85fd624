"""Which faults are seeded in what Gemma 2 and gpt-oss do to scores: caps, and sinks?"""

from __future__ import annotations

from tests.mutation.fault import Fault

GEMMA2, REFERENCE = "recipes/gemma2/model.py", "attention/reference.py"
LOOPS, KERNELS, FUSED = (
    "attention/cpu/attention.py",
    "attention/cuda/triton_kernels.py",
    "attention/npu/fused_attention.py",
)
SCORE_TESTS_OF = {
    GEMMA2: ("tests/models/test_gemma2.py", "tests/models/test_stored_otherwise.py"),
    REFERENCE: ("tests/attention/test_attention.py",),
    KERNELS: ("tests/attention/test_cuda.py",),
}

SCORE_FAULTS = (
    Fault(
        "cap_not_multiplied",
        REFERENCE,
        "(scores / cap).tanh() * cap",
        "(scores / cap).tanh()",
        "scores lie between -1 and 1, whatever the cap",
    ),
    Fault(
        "logit_cap_not_multiplied",
        "models/decoder.py",
        "(logits / cap).tanh() * cap",
        "(logits / cap).tanh()",
        "greedy tokens stay, and chances do not",
    ),
    Fault(
        "kernel_cap_not_multiplied",
        KERNELS,
        "* (CAP * LOG2_E)",
        "* LOG2_E",
        "scores lie between -1 and 1, whatever the cap",
    ),
    Fault(
        "first_layer_of_two_sees_all",
        GEMMA2,
        '"full" if layer % 2 else "sliding"',
        '"sliding" if layer % 2 else "full"',
        "the first layer has a window",
    ),
    Fault(
        "sink_left_out_of_prompts",
        LOOPS,
        "weights.sum(-1) + sunk",
        "weights.sum(-1)",
        "the weights of keys add up to one",
    ),
    Fault(
        "sink_in_the_numerator",
        REFERENCE,
        "softmax(-1)[..., :length]",
        "softmax(-1)[..., -length:]",
        "the sink weighs the last value",
    ),
    Fault(
        "sinks_of_other_heads",
        LOOPS,
        "sinks.view(scores.shape[0], 1, -1)",
        "sinks.view(-1, 1, scores.shape[0]).transpose(0, 2)",
        "heads that share a key head lie beside each other",
    ),
    Fault(
        "kernel_sink_in_its_own_base",
        KERNELS,
        ".to(tl.float32) * LOG2_E - peak",
        ".to(tl.float32) - peak",
        "scores are exponents of 2 there",
    ),
    Fault(
        "sink_of_each_part",
        KERNELS,
        "        if HAS_SINKS:\n            total += _sunk(sinks + of_head, peak)\n        at_head =",
        "        at_head =",
        "tiles that are not shared out lose it",
    ),
)
