"""Define fused attention in both versions and all forms, with the rules of a correct call.

`npu_fused_infer_attention_score` and `_v2` differ in the names of arguments, and in features that are not
modelled here except for sinks, which only the second has. Each has a form with given outputs and workspace,
for capture.

Two documented demands are not checked: that the cache has as many pages as all sequences have together, since
shared prefixes count twice; and that the scale is not the default, since 1.0 can be intended.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.operators.attention_arguments import LENGTHS, OPTIONS
from virtual_npu.operators.attention_batch import BATCH, WRONG_PAST
from virtual_npu.operators.attention_shapes import DOC, FIELD, SHAPES, head_dim, is_latent, packed
from virtual_npu.operators.softmax import attend, forget_past, uniform
from virtual_npu.operators.spans import LAYOUTS, FusedAttentionCall, in_order
from virtual_npu.simulated_products import A2, A3, A5

MOST_CAPTURED_QUERIES = 16  # query tokens of a sequence: one, and the drafted tokens
WORKSPACE = 16 * 2**20  # bytes that every call needs; workspace_bytes adds those for its query


def fused_attention(asked: FusedAttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output in its layout, and the log of the sum of exponents, float32, empty if not wanted."""
    if asked.averages:
        return in_order(uniform(asked), LAYOUTS[asked.layout][1]), torch.zeros(0)
    if asked.mode == 0 and asked.call["atten_mask"] is not None:
        asked = FusedAttentionCall(_forgetting(asked.call))
    lse = torch.zeros(*asked.query.shape[:-1], 1) if asked.call["return_softmax_lse"] else None
    out = in_order(attend(asked, lse), LAYOUTS[asked.layout][1])
    if lse is None:
        return out, torch.zeros(0)
    return out, lse if asked.packed else lse.transpose(1, 2).contiguous()


def _forgetting(call: Call) -> Call:
    mask = forget_past(call["atten_mask"], WRONG_PAST)
    return Call(call.operator, {**call.arguments, "atten_mask": mask}, call.conditions, call.names)


def _into(asked: FusedAttentionCall) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = asked.call["out"]
    result, lse = fused_attention(asked)
    outputs[0].copy_(result)
    if asked.call["return_softmax_lse"]:
        outputs[1].copy_(lse)
    return outputs[0], outputs[1]


def workspace_bytes(query: Tensor) -> int:
    """Return the bytes that a call with this query needs: its scores and partial outputs in float32."""
    return WORKSPACE + 4 * 2 * query.numel()


def _workspace(asked: FusedAttentionCall) -> Tensor:
    return torch.empty(workspace_bytes(asked.call["query"]), dtype=torch.uint8)


def _allocates(call: Call) -> Iterator[Breach]:
    yield "out", "not given, while a stream is captured"


def _frozen(call: Call) -> Iterator[Breach]:
    if call.conditions.capture() != "group":
        yield "actual_seq_kvlen", "a list, frozen by the capture"


def _no_workspace(call: Call) -> Iterator[Breach]:
    if call["workspace"] is None:
        yield "workspace", "None, while a stream is captured"


def _many_queries(call: Call) -> Iterator[Breach]:
    ends = call["actual_seq_qlen"]
    if packed(call) and ends:
        longest = max(after - before for before, after in pairwise([0, *ends]))
        if longest > MOST_CAPTURED_QUERIES:
            yield "actual_seq_qlen", f"of {longest} query tokens a sequence"


def _long_latent(call: Call) -> Iterator[Breach]:
    if is_latent(call):
        for argument, value in _many_queries(call):
            yield argument, f"{value}, in the space of latents"


def _small_workspace(asked: FusedAttentionCall) -> Iterator[Breach]:
    given: Tensor | None = asked.call["workspace"]
    needed = workspace_bytes(asked.call["query"])
    if given is not None and given.numel() * given.element_size() < needed:
        yield "workspace", f"{shape(given)}, of {needed} bytes"


def _outputs(asked: FusedAttentionCall) -> Iterator[Breach]:
    outputs: list[Tensor] = asked.call["out"]
    if len(outputs) != 2:
        yield "out", f"a list of {len(outputs)}"
        return
    query, dim = asked.query, head_dim(asked.call, "value")
    want = in_order(query.new_empty(*query.shape[:-1], dim), LAYOUTS[asked.layout][1])
    if outputs[0].shape != want.shape or outputs[0].dtype != want.dtype or not outputs[0].is_contiguous():
        yield "out", f"{shape(outputs[0])} for {shape(want)}"
    if asked.call["return_softmax_lse"]:
        lse = query.new_empty(*query.shape[:-1], 1, dtype=torch.float32)
        lse = lse if asked.packed else lse.transpose(1, 2)
        if outputs[1].shape != lse.shape or outputs[1].dtype != lse.dtype:
            yield "out", f"{shape(outputs[1])} for {shape(lse)}"


CAPTURE = "vllm-ascend compilation/acl_graph.py"
NEW_FORM = (
    Rule(
        "capture-form",
        "in a capture the form with outputs and a workspace is called, which allocates nothing",
        CAPTURE,
        "call .out with workspace and out",
        _allocates,
    ),
)
CAPTURED = (
    Rule(
        "task-group",
        "lengths on the host can be updated after a capture only in a task group",
        CAPTURE,
        "put the call between graph_task_group_begin and graph_task_group_end",
        _frozen,
    ),
    Rule(
        "workspace",
        "in a capture the workspace is given, so that nothing is allocated",
        CAPTURE,
        "ask _get_max_workspace for it, with the largest query",
        _no_workspace,
    ),
    Rule(
        "captured-queries",
        f"in TND a captured step of decodes has at most {MOST_CAPTURED_QUERIES} query tokens a sequence",
        "vllm-ascend attention/attention_v1.py: decode_threshold, the limit of the TND layout",
        "run longer spans without a graph",
        _many_queries,
    ),
)
SHORT_LATENT = Rule(
    "latent-queries",
    f"in the space of latents a sequence has at most {MOST_CAPTURED_QUERIES} query tokens",
    "vllm-ascend attention/mla_v1.py: decode_threshold",
    "expand the latents for longer spans",
    _long_latent,
)
OUT_FORM = (
    Rule(
        "workspace-size",
        "a workspace is as large as the query wants",
        CAPTURE,
        "ask _get_max_workspace for it, with the largest query",
        _small_workspace,
    ),
    Rule(
        "outputs",
        "out is [attention, lse] of the shapes and types that the call without it returns",
        "the schema: Tensor[] out",
        "allocate both before the call",
        _outputs,
    ),
)

_TENSORS = "(Tensor query, Tensor key, Tensor value, *, "
_V1 = (
    "Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
    "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False"
)
_V2 = (
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, "
    "Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, "
    "Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, "
    "Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, "
    "Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1, "
    "int num_key_value_heads=0, float softmax_scale=1., int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int sparse_mode=0, int block_size=0, '
    "int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, "
    "bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None, int? out_dtype=None"
)
_OUT = ", Tensor? workspace=None, Tensor[] out) -> (Tensor, Tensor)"
_NAMES = {
    "": {
        "actual_seq_qlen": "actual_seq_lengths",
        "actual_seq_kvlen": "actual_seq_lengths_kv",
        "num_query_heads": "num_heads",
        "softmax_scale": "scale",
        "return_softmax_lse": "softmax_lse_flag",
    },
    "_v2": {},
}


def _version(version: str, arguments: str) -> tuple[Operator, ...]:
    name = f"npu_fused_infer_attention_score{version}"
    of_the_other = "channels" if version else "sink"  # a rule on what this version does not take
    own = tuple(rule for rule in SHAPES + OPTIONS if rule.name != of_the_other)
    forms = (
        (f"npu::{name}{_TENSORS}{arguments}) -> (Tensor, Tensor)", BATCH, NEW_FORM, fused_attention),
        (f"npu::{name}.out{_TENSORS}{arguments}{_OUT}", BATCH + OUT_FORM, CAPTURED, _into),
        (f"npu::_{name}_get_max_workspace{_TENSORS}{arguments}) -> Tensor", (), (), _workspace),
    )
    return tuple(
        Operator(
            schema=schema,
            products=(A2, A3, A5),
            source=f"{DOC}; {FIELD}",
            read=FusedAttentionCall,
            first=(*own, *LENGTHS, SHORT_LATENT),
            rules=rules,
            captured=captured,
            reference=reference,
            names=_NAMES[version],
        )
        for schema, rules, captured, reference in forms
    )


OPERATORS = _version("", _V1) + _version("_v2", _V2)
