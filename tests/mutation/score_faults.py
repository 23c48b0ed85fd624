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

SCORE_FAULTS = {
    "cap_not_multiplied": Fault(
        REFERENCE + "::Attention._capped",
        "(scores / cap).tanh() * cap",
        "(scores / cap).tanh()",
        "scores lie between -1 and 1, whatever the cap",
    ),
    "logit_cap_not_multiplied": Fault(
        "models/decoder.py::Decoder.head_logits",
        "(logits / cap).tanh() * cap",
        "(logits / cap).tanh()",
        "greedy tokens stay, and chances do not",
    ),
    "kernel_cap_not_multiplied": Fault(
        KERNELS + "::_read", "CAP * LOG2_E", "LOG2_E", "scores lie between -1 and 1, whatever the cap"
    ),
    "first_layer_of_two_sees_all": Fault(
        GEMMA2 + "::config",
        '"full" if layer % 2 else "sliding"',
        '"sliding" if layer % 2 else "full"',
        "the first layer has a window",
    ),
    "sink_left_out_of_prompts": Fault(
        LOOPS + "::CpuAttention._weigh",
        "weights.sum(-1) + sunk",
        "weights.sum(-1)",
        "the weights of keys add up to one",
    ),
    "sink_in_the_numerator": Fault(
        REFERENCE + "::Attention._dense",
        "scores.softmax(-1)[..., :length]",
        "scores.softmax(-1)[..., -length:]",
        "the sink weighs the last value",
    ),
    "sinks_of_other_heads": Fault(
        LOOPS + "::CpuAttention._weigh",
        "sinks.view(scores.shape[0], 1, -1)",
        "sinks.view(-1, 1, scores.shape[0]).transpose(0, 2)",
        "heads that share a key head lie beside each other",
    ),
    "kernel_sink_in_its_own_base": Fault(
        KERNELS + "::_sunk",
        "tl.load(sinks).to(tl.float32) * LOG2_E",
        "tl.load(sinks).to(tl.float32)",
        "scores are exponents of 2 there",
    ),
    "sink_of_each_part": Fault(
        KERNELS + "::attend_tiles",
        "if HAS_SINKS:\n    total += _sunk(sinks + of_head, peak)",
        "",
        "tiles that are not shared out lose it",
    ),
}
