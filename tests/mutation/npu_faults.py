"""Which faults are seeded in what calls Ascend's operators, and in the rules that they are called by?"""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

NPU, ATB, ASCEND = (
    "attention/npu/fused_attention.py",
    "attention/npu/atb_attention.py",
    "attention/npu/ascend_attention.py",
)
PRODUCTS, FUSED = "devices/ascend_limits.py", "models/ops/npu.py"
RULES = "virtual_npu/operators/"
ARGUMENTS = RULES + "attention_arguments.py"
SHAPES, PAGING, SPANS = RULES + "attention_shapes.py", RULES + "paging.py", RULES + "spans.py"
WRITES, ATB_RULES = RULES + "cache.py", RULES + "atb.py"
CAPTURE, EXECUTION = "virtual_npu/cann/capture.c", "virtual_npu/cann/execution.c"
DEFERRED, KERNELS = "virtual_npu/deferred_calls.py", "virtual_npu/kernels.py"
MACHINE, QUESTIONS = "recipes/build/machine.py", "doctor/verify/npu/questions.py"
MASKS, ANSWERS = "doctor/verify/npu/mask_questions.py", "devices/ascend_answers.py"
ROPE, FILTERS = "models/rope.py", "models/sampling/top_k_top_p.py"

CALLS = (
    "tests/models/test_npu.py",
    "tests/models/test_decode_masks.py",
    "tests/attention/test_attention.py",
    "tests/virtual_npu/test_aclop.py",
    "tests/doctor/test_probes.py",
)
ATB_CALLS = (
    "tests/attention/test_products.py",
    "tests/attention/test_atb.py",
    "tests/devices/test_ascend_answers.py",
    "tests/virtual_npu/test_aclop.py",
    "tests/models/test_310p.py",
)
RULE_TESTS = tuple(
    f"tests/virtual_npu/test_{name}.py" for name in ("wrong_calls", "attention", "right_calls")
)
GRAPH_TESTS = tuple(f"tests/virtual_npu/test_{name}.py" for name in ("graphs", "task_groups"))
NPU_TESTS_OF = {
    **dict.fromkeys((NPU, ASCEND), CALLS),
    FUSED: (
        *CALLS,
        "tests/models/test_quantization.py",
        "tests/models/test_prefetch.py",
        "tests/models/test_tensor_parallel_npu.py",
    ),
    **dict.fromkeys((ATB, PRODUCTS), ATB_CALLS),
    **dict.fromkeys((ARGUMENTS, SHAPES, PAGING, SPANS, WRITES, ATB_RULES), RULE_TESTS),
    DEFERRED: (*GRAPH_TESTS, "tests/models/test_npu.py"),
    **dict.fromkeys((CAPTURE, EXECUTION), (*GRAPH_TESTS, "tests/virtual_npu/test_hammer.py")),
    KERNELS: ("tests/virtual_npu/test_launch_log.py",),
    MACHINE: ("tests/models/test_npu.py",),
    **dict.fromkeys((QUESTIONS, MASKS), ("tests/doctor/test_probes.py",)),
    ANSWERS: ("tests/devices/test_ascend_answers.py",),
    ROPE: ("tests/models/test_rope.py",),
    FILTERS: ("tests/models/test_sampler.py",),
}

NPU_FAULTS = {
    "updates_behind_the_replay_that_waits": Fault(
        NPU + "::FusedAttention.replay",
        "self.update_stream == current",
        "False",
        "where the current stream is the one of the pool that updates are sent to, a replay waits for ever",
    ),
    "plain_operators_know_no_product": Fault(
        MACHINE + "::Npu.operators",
        "PlainNpuOps(self.product)",
        "Ops()",
        "the first 910 computes W8A8, which its limits refuse, and follows no answer of a probe",
    ),
    "float16_is_probed_as_no_attention_calls_it": Fault(
        QUESTIONS + "::packs_float16",
        "machine.product.cuts(np.array([queries for queries, _ in spans]))",
        "[(0, len(spans))]",
        "the 950 refuses prompts and decodes in one call, so that float16 would be found wrong there",
    ),
    "masks_probed_in_one_replay": Fault(
        MASKS + "::Decodes.apart",
        "REPLAYS",
        "REPLAYS[:1]",
        "vllm-ascend #12605: without a mask graphs are wrong, which calls of the first lengths do not show",
    ),
    "decodes_without_a_mask_on_trust": Fault(
        PRODUCTS + "::AscendProduct",
        "unmasks_decodes: bool = False",
        "unmasks_decodes: bool = True",
        "no probe has said that they are right",
    ),
    "withdrawn_answer_counts_as_another": Fault(
        ANSWERS + "::answered",
        "del found[name]",
        'found["unmasks_decodes"] = found.pop(name)',
        "a yes of one call outside of graphs turns the mask off in graphs",
    ),
    "mask_shows_what_it_should_hide": Fault(
        NPU + "::FusedAttention.__init__",
        "torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).triu(1)",
        "torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).tril()",
        "op-plugin's third example of sparse_mode 3 passes the mask so: queries see the future",
    ),
    "prompts_without_a_mask": Fault(
        NPU + "::FusedAttention._unsunk",
        "part.is_decodes and self.product.unmasks_decodes",
        "self.product.unmasks_decodes",
        "vllm-ascend #13699: with several queries a span this comes to the mean of the values",
    ),
    "decodes_of_a_window_without_a_mask": Fault(
        NPU + "::FusedAttention._unsunk",
        "window is not None",
        "window is not None and not part.is_decodes",
        "a decode sees what lies before its window",
    ),
    "mask_of_half_the_side": Fault(
        ASCEND, "MASK_SIDE = 2048", "MASK_SIDE = 1024", "the compressed modes read past its end"
    ),
    "query_lengths_one_by_one": Fault(
        NPU + "::FusedAttention.plan",
        "np.cumsum(lens[spans])",
        "lens[spans]",
        "TND wants them to add up: else error 561002",
    ),
    "keys_without_the_token_itself": Fault(
        NPU + "::FusedAttention.plan",
        "batch.stops[spans]",
        "batch.stops[spans] - 1",
        "a decode does not see its own key",
    ),
    "window_one_too_long": Fault(
        NPU + "::FusedAttention._unsunk",
        '"pre_tokens": window - 1',
        '"pre_tokens": window',
        "the query itself is one of the window",
    ),
    "default_cache_mode": Fault(
        NPU + "::FusedAttention.write",
        'cache_mode="Norm"',
        'cache_mode="PA_NZ"',
        "the operator's own default is another order of the cache",
    ),
    "default_scale": Fault(
        NPU + "::FusedAttention._unsunk", '"scale": self.shape.scale', "", "the operator's own is 1.0"
    ),
    "replay_of_old_lengths": Fault(
        NPU + "::FusedAttention.replay",
        "call.arguments | {lengths: kv_lens}",
        "call.arguments",
        "vllm-ascend #4649: a replay attends to what was there when it was captured",
    ),
    "replayed_before_the_last_was_waited_for": Fault(
        NPU + "::FusedAttention.replay",
        "self.update_stream.wait_stream(current)",
        "",
        "a step reads the lengths of the one after it",
    ),
    "rows_of_the_next_call": Fault(
        ASCEND + "::AscendAttention.cuts",
        "ends[last]",
        "ends[last - 1]",
        "a call is given fewer rows than its lengths say",
    ),
    "columns_within_places": Fault(
        ATB + "::AtbAttention.new_pages",
        "(shape.num_kv_heads * shape.head_dim // COLUMN, shape.page_size, COLUMN)",
        "(shape.page_size, shape.num_kv_heads * shape.head_dim // COLUMN, COLUMN)",
        "the cache lies as on a 910B, whose operators it is not read by",
    ),
    "pages_in_rows": Fault(
        ATB + "::AtbAttention.new_pages",
        "acl_format=FRACTAL_NZ",
        "acl_format=2",
        "ATB takes the 310P's cache in its inner format alone",
    ),
    "decodes_among_prompts": Fault(
        ATB + "::AtbAttention.plan",
        "(lens[spans] > 1).any()",
        "(lens[spans] > 1).all()",
        "a mixed batch goes to the operator for one query a sequence",
    ),
    "lengths_of_queries_sent": Fault(
        ATB + "::AtbAttention.plan",
        "torch.from_numpy(lens[spans])",
        "to_device(lens[spans], self.device)",
        "ascend-transformer-boost reads them on the host: its hostData is null",
    ),
    "mask_that_rewards": Fault(ATB, "-10000.0", "10000.0", "what is hidden outweighs all else"),
    "swiglu_of_any_width": Fault(
        PRODUCTS, "swiglu_bytes=64", "", "npu_swiglu of the 310P takes halves of a multiple of 64 bytes"
    ),
    "rotary_mul_forgotten": Fault(
        FUSED + "::NpuOps.rotary",
        "turned or self.product.is_fused",
        "turned",
        "heads beyond the buffer are turned in plain torch on every product",
    ),
    "gate_and_up_exchanged": Fault(
        FUSED + "::NpuOps.mlp_int8",
        "activate_left=True",
        "activate_left=False",
        "the operator's own default gates by the second half",
    ),
    "scale_of_the_other_output": Fault(
        FUSED + "::NpuOps.add_rms_norm_int8",
        (
            "rows, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(x, residual, weight,"
            " epsilon=eps, output_mask=[True, False])"
        ),
        (
            "rows, _, total, _, scale = torch_npu.npu_add_rms_norm_dynamic_quant(x, residual, weight,"
            " epsilon=eps, output_mask=[True, False])"
        ),
        "the second output is left out, and its scale is empty",
    ),
    "table_without_the_longest": Fault(
        ROPE + "::Rope.tabulate",
        "num_positions + 1",
        "num_positions",
        "a request at its full length reads past the table of dynamic rope",
    ),
    "dropped_share_for_the_kept": Fault(
        FILTERS + "::sort_parameters",
        '"excess": 1 - top_p',
        '"excess": top_p',
        "over rising weights the running sum is first of what top_p drops",
    ),
    "captured_calls_counted_twice": Fault(
        KERNELS + "::Kernels._kernel.run", "state != CAPTURED", "True", "a capture launches nothing"
    ),
    "sum_of_queries_unasked": Fault(
        ARGUMENTS + "::_query_sum",
        'call["actual_seq_qlen"][-1] != tokens',
        'call["actual_seq_qlen"][-1] > tokens',
        "padding rows without a sequence of their own pass: error 561002 on the device",
    ),
    "falling_lengths_pass": Fault(
        ARGUMENTS + "::_query_lens",
        "lens[0] < 0 or any(after < before for before, after in pairwise(lens))",
        "lens[0] < 0",
        "lengths one by one pass where their sum happens to fit",
    ),
    "pages_of_any_size": Fault(
        ARGUMENTS + "::_page_size",
        "size % step or not least <= size <= most",
        "not least <= size <= most",
        "pages that are no multiple of 16 pass",
    ),
    "wrong_type_passes": Fault(
        SHAPES + "::_dtype",
        "not is_dtype(tensor, call.conditions.product.dtypes, call.conditions) or tensor.dtype != query",
        "not is_dtype(tensor, call.conditions.product.dtypes, call.conditions)",
        "float16 queries over a bfloat16 cache pass",
    ),
    "page_beyond_the_last": Fault(
        PAGING + "::outside", "ids >= num_pages", "ids > num_pages", "the first page that is none passes"
    ),
    "held_by_nobody": Fault(
        PAGING + "::not_held",
        "~torch.isin(ids, held)",
        "ids < 0",
        "a page that was released is read and no one says so",
    ),
    "causal_but_for_oneself": Fault(
        SPANS + "::FusedAttentionCall._chunk",
        "places <= at + after",
        "places < at + after",
        "the reference hides each query's own key",
    ),
    "written_twice": Fault(
        WRITES + "::_unique",
        "len(places) != len(slots)",
        "len(places) > len(slots)",
        "two tokens in one place pass, of which the device keeps either",
    ),
    "lengths_lie_anywhere": Fault(
        ATB_RULES + "::_placed",
        "on_device(call[name]) != wanted",
        "on_device(call[name]) is None",
        "lengths that the device cannot find pass",
    ),
    "lengths_frozen_unseen": Fault(
        ATB_RULES + "::_frozen",
        'call.conditions.capture() != "group"',
        'call.conditions.capture() == "none"',
        "every replay reads as many keys as there were when it was captured",
    ),
    "lengths_read_when_replayed": Fault(
        DEFERRED + "::DeferredCalls.defer",
        'if call.name != "aten::copy_": ...',
        "if not call.mixed: ...",
        "what the host writes after the capture would reach the device, where it never does",
    ),
    "updated_while_it_runs": TextFault(
        CAPTURE,
        "if (!before(&group->ran, stream))",
        "if (group->ran.count < 0)",
        "a replay that nobody waited for may read the arguments of the next",
    ),
    "older_record_will_do": TextFault(
        EXECUTION,
        "    if (task->kind == WAIT) task->count = event->num_sent;\n",
        "",
        "a wait passes by an older record of its event",
    ),
    "failure_without_records": TextFault(
        EXECUTION,
        "if (task.kind == RECORD || task.kind == WRITE || task.kind == RESET)",
        "if (task.kind == RESET)",
        "other streams wait forever for one that failed",
    ),
    "host_waits_for_nobody": TextFault(
        EXECUTION,
        "while (stream->num_left < sent && (inside || others_run())) {",
        "while (stream->num_left < sent && inside) {",
        "a stream is called blocked while another thread is about to record its event",
    ),
    "update_that_writes_elsewhere": Fault(
        DEFERRED + "::DeferredCalls._updated",
        "old.writes != deferred.writes",
        "not deferred.writes",
        "what follows in the graph reads the old place",
    ),
    "what_is_captured_is_there": Fault(
        DEFERRED + "::DeferredCalls.defer",
        "if state == CAPTURED: ...",
        "if state == UPDATING: ...",
        "a value read while a graph is captured looks like a result",
    ),
}
