"""Which faults are seeded in what a product refuses of torch's operators, and in how that is met?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ACLOP, LIMITS, FUSED = "virtual_npu/aclop.py", "devices/ascend_limits.py", "models/ops/npu.py"
MACHINE, ACTIVATION = "recipes/build/machine.py", "virtual_npu/operators/activation.py"
MATMUL, CAPTURED = "virtual_npu/operators/matmul.py", "virtual_npu/operators/attention.py"
STORAGE, HOST_CALL = "kv_cache/storage.py", "virtual_npu/host_call.py"
ANSWERS = "devices/ascend_answers.py"

ACLOP_TESTS = ("tests/virtual_npu/test_aclop.py",)
RULE_TESTS = tuple(f"tests/virtual_npu/test_{name}.py" for name in ("wrong_calls", "right_calls", "products"))
ACLOP_TESTS_OF = {
    ACLOP: ACLOP_TESTS,
    HOST_CALL: ACLOP_TESTS,
    **dict.fromkeys((ACTIVATION, MATMUL, CAPTURED), RULE_TESTS),
    MACHINE: ACLOP_TESTS,
    ANSWERS: ("tests/devices/test_ascend_answers.py",),
}

ACLOP_FAULTS = (
    Fault(
        "online_capture_passes",
        ACLOP,
        "and not torch.npu.is_jit_compile_false() and call.is_captured",
        "and torch.npu.is_jit_compile_false() and call.is_captured",
        "a 310P captures what it compiles when it is called",
    ),
    Fault(
        "sum_of_tiles_passes",
        ACLOP,
        'if call.name == "addmm" and is_before_910b():',
        'if call.name == "addmm" and not is_before_910b():',
        "a product with a bias goes to aclop on a 310P, and no one says so",
    ),
    Fault(
        "copy_by_index_passes",
        ACLOP,
        '"index_copy_", "index_copy", ',
        "",
        "every page that is copied is read back by the host",
    ),
    Fault(
        "tiles_captured_by_anything",
        ACLOP,
        "if call.name not in PRODUCTS_OF_TILES and call.is_captured:",
        "if call.name in PRODUCTS_OF_TILES and call.is_captured:",
        "operators that do not know the format are captured",
    ),
    Fault(
        "cast_that_forgets_the_format",
        HOST_CALL,
        "if self.name == FORMAT_CAST:",
        "if not self.name:",
        "no tensor lies in tiles, so that no rule about them is ever asked",
    ),
    Fault(
        "compile_mode_as_it_was",
        MACHINE,
        "            use_compiled_kernels()\n",
        "",
        "the recipe with graphs for a 310P cannot start its capture",
    ),
    Fault(
        "bias_added_with_tiles",
        FUSED,
        "if bias is None or self.product.adds_to_tiles:",
        "if bias is None or not self.product.adds_to_tiles:",
        "addmm with a weight in tiles on a 310P",
    ),
    Fault(
        "swiglu_of_odd_halves",
        ACTIVATION,
        "is P310 and half_bytes % HALF_BYTES:",
        "is P310 and x.shape[0] % HALF_BYTES:",
        "halves that do not end at 64 bytes pass",
    ),
    Fault(
        "int8_on_the_950",
        MATMUL,
        "        products=(P310, A2, A3),\n        source=PRODUCT",
        "        products=(P310, A2, A3, A5),\n        source=PRODUCT",
        "npu_quant_matmul is called where its page does not list the product",
    ),
    Fault(
        "captured_prompts",
        CAPTURED,
        "if longest > MOST_CAPTURED_QUERIES:",
        "if longest > 2 * MOST_CAPTURED_QUERIES:",
        "vllm-ascend asserts it: a captured step of decodes has 16 query tokens a sequence",
    ),
    Fault(
        "gaps_wider_than_a_page",
        LIMITS,
        "small = [size for size in sizes if size <= page_size]",
        "small = [size for size in sizes if size <= 2 * page_size]",
        "padding rows beyond the null page write to somebody's page",
    ),
    Fault(
        "null_page_by_index",
        STORAGE,
        "            tensor[:1].zero_()\n",
        "            tensor.index_fill_(0, _index(np.zeros(1, np.int64), tensor), 0)\n",
        "op-plugin uploads two layer-sized tensors of the host for it",
    ),
    Fault(
        "answers_without_effect",
        ANSWERS,
        "return replace(product, **found)",
        "return product",
        "the first day on hardware changes nothing",
    ),
    Fault(
        "float16_in_spite_of_the_answer",
        LIMITS,
        "and not self.packs_float16:",
        "and self.packs_float16 is None:",
        "attention that was found wrong in float16 is used in it",
    ),
    Fault(
        "nan_that_the_maximum_lost",
        FUSED,
        "is_finite & ~logits.isnan().any(-1)",
        "is_finite",
        "a row of NaN gives a token, where the device's maximum does not keep it",
    ),
    Fault(
        "tiles_of_every_weight",
        FUSED,
        "return in_tiles(weight) if self.product.tiles_weights else weight, bias",
        "return in_tiles(weight), bias",
        "vllm-ascend #4960: bfloat16 in FRACTAL_NZ failed in captured steps",
    ),
)
