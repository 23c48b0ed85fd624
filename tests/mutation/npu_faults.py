"""Which faults are seeded in what calls Ascend's operators, and in the rules that they are called by?"""

from __future__ import annotations

from tests.mutation.fault import Fault

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

NPU_FAULTS = (
    Fault(
        "updates_behind_the_replay_that_waits",
        NPU,
        "while self.update_stream == current:",
        "while False:",
        "where the current stream is the one of the pool that updates are sent to, a replay waits for ever",
    ),
    Fault(
        "plain_operators_know_no_product",
        MACHINE,
        "PlainNpuOps(self.product) if has_none",
        "Ops() if has_none",
        "the first 910 computes W8A8, which its limits refuse, and follows no answer of a probe",
    ),
    Fault(
        "float16_is_probed_as_no_attention_calls_it",
        QUESTIONS,
        "cuts = machine.product.cuts(np.array([queries for queries, _ in spans]))",
        "cuts = [(0, len(spans))]",
        "the 950 refuses prompts and decodes in one call, so that float16 would be found wrong there",
    ),
    Fault(
        "masks_probed_in_one_replay",
        MASKS,
        "for replay in REPLAYS:",
        "for replay in REPLAYS[:1]:",
        "vllm-ascend #12605: without a mask graphs are wrong, which calls of the first lengths do not show",
    ),
    Fault(
        "decodes_without_a_mask_on_trust",
        PRODUCTS,
        "unmasks_decodes: bool = False",
        "unmasks_decodes: bool = True",
        "no probe has said that they are right",
    ),
    Fault(
        "withdrawn_answer_counts_as_another",
        ANSWERS,
        "del found[name]",
        'found["unmasks_decodes"] = found.pop(name)',
        "a yes of one call outside of graphs turns the mask off in graphs",
    ),
    Fault(
        "mask_shows_what_it_should_hide",
        NPU,
        "dtype=torch.int8).triu(1)",
        "dtype=torch.int8).tril()",
        "op-plugin's third example of sparse_mode 3 passes the mask so: queries see the future",
    ),
    Fault(
        "prompts_without_a_mask",
        NPU,
        "        if part.is_decodes and",
        "        if",
        "vllm-ascend #13699: with several queries a span this comes to the mean of the values",
    ),
    Fault(
        "decodes_of_a_window_without_a_mask",
        NPU,
        "        if window is not None:",
        "        if window is not None and not part.is_decodes:",
        "a decode sees what lies before its window",
    ),
    Fault(
        "mask_of_half_the_side",
        ASCEND,
        "MASK_SIDE = 2048",
        "MASK_SIDE = 1024",
        "the compressed modes read past its end",
    ),
    Fault(
        "query_lengths_one_by_one",
        NPU,
        "np.cumsum(lens[spans]).tolist()",
        "lens[spans].tolist()",
        "TND wants them to add up: else error 561002",
    ),
    Fault(
        "keys_without_the_token_itself",
        NPU,
        "batch.stops[spans].tolist()",
        "(batch.stops[spans] - 1).tolist()",
        "a decode does not see its own key",
    ),
    Fault(
        "window_one_too_long",
        NPU,
        '"pre_tokens": window - 1',
        '"pre_tokens": window',
        "the query itself is one of the window",
    ),
    Fault(
        "default_cache_mode",
        NPU,
        'cache_mode="Norm"',
        'cache_mode="PA_NZ"',
        "the operator's own default is another order of the cache",
    ),
    Fault(
        "default_scale",
        NPU,
        '            "scale": self.shape.scale,\n',
        "",
        "the operator's own is 1.0",
    ),
    Fault(
        "replay_of_old_lengths",
        NPU,
        "call.arguments | {lengths: kv_lens}",
        "call.arguments",
        "vllm-ascend #4649: a replay attends to what was there when it was captured",
    ),
    Fault(
        "replayed_before_the_last_was_waited_for",
        NPU,
        "        self.update_stream.wait_stream(current)\n",
        "",
        "a step reads the lengths of the one after it",
    ),
    Fault(
        "rows_of_the_next_call",
        ASCEND,
        "slice(ends[first], ends[last])",
        "slice(ends[first], ends[last - 1])",
        "a call is given fewer rows than its lengths say",
    ),
    Fault(
        "columns_within_places",
        ATB,
        "(shape.num_kv_heads * shape.head_dim // COLUMN, shape.page_size, COLUMN)",
        "(shape.page_size, shape.num_kv_heads * shape.head_dim // COLUMN, COLUMN)",
        "the cache lies as on a 910B, whose operators it is not read by",
    ),
    Fault(
        "pages_in_rows",
        ATB,
        "acl_format=FRACTAL_NZ",
        "acl_format=2",
        "ATB takes the 310P's cache in its inner format alone",
    ),
    Fault(
        "decodes_among_prompts",
        ATB,
        "if (lens[spans] > 1).any() else None",
        "if (lens[spans] > 1).all() else None",
        "a mixed batch goes to the operator for one query a sequence",
    ),
    Fault(
        "lengths_of_queries_sent",
        ATB,
        "torch.from_numpy(lens[spans])",
        "to_device(lens[spans], self.device)",
        "ascend-transformer-boost reads them on the host: its hostData is null",
    ),
    Fault(
        "mask_that_rewards",
        ATB,
        "HIDDEN = -10000.0",
        "HIDDEN = 10000.0",
        "what is hidden outweighs all else",
    ),
    Fault(
        "swiglu_of_any_width",
        PRODUCTS,
        "        swiglu_bytes=64,\n",
        "",
        "npu_swiglu of the 310P takes halves of a multiple of 64 bytes",
    ),
    Fault(
        "rotary_mul_forgotten",
        FUSED,
        "if not (turned or self.product.is_fused):",
        "if not turned:",
        "heads beyond the buffer are turned in plain torch on every product",
    ),
    Fault(
        "gate_and_up_exchanged",
        FUSED,
        "activation_scale=x.scale[:, None],\n            activate_left=True",
        "activation_scale=x.scale[:, None],\n            activate_left=False",
        "the operator's own default gates by the second half",
    ),
    Fault(
        "scale_of_the_other_output",
        FUSED,
        "rows, _, total, scale, _ =",
        "rows, _, total, _, scale =",
        "the second output is left out, and its scale is empty",
    ),
    Fault(
        "table_without_the_longest",
        ROPE,
        "torch.arange(num_positions + 1)",
        "torch.arange(num_positions)",
        "a request at its full length reads past the table of dynamic rope",
    ),
    Fault(
        "dropped_share_for_the_kept",
        FILTERS,
        '"excess": 1 - top_p',
        '"excess": top_p',
        "over rising weights the running sum is first of what top_p drops",
    ),
    Fault(
        "captured_calls_counted_twice",
        KERNELS,
        "if state != CAPTURED:  # what is captured",
        "if True:  # what is captured",
        "a capture launches nothing",
    ),
    Fault(
        "sum_of_queries_unasked",
        ARGUMENTS,
        'call["actual_seq_qlen"][-1] != tokens',
        'call["actual_seq_qlen"][-1] > tokens',
        "padding rows without a sequence of their own pass: error 561002 on the device",
    ),
    Fault(
        "falling_lengths_pass",
        ARGUMENTS,
        "elif lens[0] < 0 or any(after < before for before, after in pairwise(lens)):",
        "elif lens[0] < 0:",
        "lengths one by one pass where their sum happens to fit",
    ),
    Fault(
        "pages_of_any_size",
        ARGUMENTS,
        "elif size % step or not least <= size <= most:",
        "elif not least <= size <= most:",
        "pages that are no multiple of 16 pass",
    ),
    Fault(
        "wrong_type_passes",
        SHAPES,
        "call.conditions) or tensor.dtype != query:",
        "call.conditions):",
        "float16 queries over a bfloat16 cache pass",
    ),
    Fault(
        "page_beyond_the_last",
        PAGING,
        "(ids >= num_pages)",
        "(ids > num_pages)",
        "the first page that is none passes",
    ),
    Fault(
        "held_by_nobody",
        PAGING,
        "wrong = ids[~torch.isin(ids, held)]",
        "wrong = ids[ids < 0]",
        "a page that was released is read and no one says so",
    ),
    Fault(
        "causal_but_for_oneself",
        SPANS,
        "seen = places <= at + after",
        "seen = places < at + after",
        "the reference hides each query's own key",
    ),
    Fault(
        "written_twice",
        WRITES,
        "places, counts = torch.unique(slots, return_counts=True)\n    if len(places) != len(slots):",
        "places, counts = torch.unique(slots, return_counts=True)\n    if len(places) > len(slots):",
        "two tokens in one place pass, of which the device keeps either",
    ),
    Fault(
        "lengths_lie_anywhere",
        ATB_RULES,
        "on_device(call[name]) != wanted",
        "on_device(call[name]) is None",
        "lengths that the device cannot find pass",
    ),
    Fault(
        "lengths_frozen_unseen",
        ATB_RULES,
        'if on_host and call.conditions.capture() != "group":',
        'if on_host and call.conditions.capture() == "none":',
        "every replay reads as many keys as there were when it was captured",
    ),
    Fault(
        "lengths_read_when_replayed",
        DEFERRED,
        'if call.name != "aten::copy_":',
        "if not call.mixed:",
        "what the host writes after the capture would reach the device, where it never does",
    ),
    Fault(
        "updated_while_it_runs",
        CAPTURE,
        "if (!before(&group->ran, stream))",
        "if (group->ran.count < 0)",
        "a replay that nobody waited for may read the arguments of the next",
    ),
    Fault(
        "older_record_will_do",
        EXECUTION,
        "    if (task->kind == WAIT) task->count = event->num_sent;\n",
        "",
        "a wait passes by an older record of its event",
    ),
    Fault(
        "failure_without_records",
        EXECUTION,
        "if (task.kind == RECORD || task.kind == WRITE || task.kind == RESET)",
        "if (task.kind == RESET)",
        "other streams wait forever for one that failed",
    ),
    Fault(
        "host_waits_for_nobody",
        EXECUTION,
        "while (stream->num_left < sent && (inside || others_run())) {",
        "while (stream->num_left < sent && inside) {",
        "a stream is called blocked while another thread is about to record its event",
    ),
    Fault(
        "update_that_writes_elsewhere",
        DEFERRED,
        "if old.writes != deferred.writes:",
        "if not deferred.writes:",
        "what follows in the graph reads the old place",
    ),
    Fault(
        "what_is_captured_is_there",
        DEFERRED,
        "if state == CAPTURED:  # in a queue",
        "if state == UPDATING:  # in a queue",
        "a value read while a graph is captured looks like a result",
    ),
)
