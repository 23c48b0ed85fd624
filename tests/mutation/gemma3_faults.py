"""Which faults are seeded in what Gemma 3 alone has?"""

from __future__ import annotations

from tests.mutation.fault import Fault

GEMMA3, MLP, READER = "recipes/gemma3/model.py", "models/mlp.py", "models/huggingface.py"
GEMMA3_TESTS_OF = dict.fromkeys(
    (GEMMA3, MLP, READER), ("tests/models/test_gemma3.py", "tests/models/test_stored_otherwise.py")
)

GEMMA3_FAULTS = {
    "one_base_for_all_layers": Fault(
        "models/decoder.py::Decoder.forward",
        "0 if self.part.windows[number] is None else -1",
        "0",
        "layers with a window are turned as those that see all",
    ),
    "one_added_to_norms_of_layers_alone": Fault(
        "models/weights.py::placed",
        'name.endswith("norm.weight")',
        'name.endswith("layernorm.weight")',
        "norms of heads and the last one are about 0, not about 1",
    ),
    "gelu_lost_in_int8": Fault(
        MLP + "::MLP.joins_int8",
        "self.is_swiglu and self.gate_up.takes_int8 and self.down.takes_int8",
        "self.gate_up.takes_int8 and self.down.takes_int8",
        "the operator that joins gate and rounding knows no other gate",
    ),
    "scores_by_the_size_of_a_head": Fault(
        GEMMA3 + "::config",
        'integer(hf, "query_pre_attn_scalar", 256)',
        "plain.head_dim",
        "of the 27B alone the two differ",
    ),
    "norms_change_places": Fault(
        GEMMA3,
        '("input", "pre_feedforward", "post_attention", "post_feedforward")',
        '("input", "post_attention", "pre_feedforward", "post_feedforward")',
        "as in Llama, where the norm after attention is the one before the MLP",
    ),
    "first_layer_sees_all": Fault(
        GEMMA3 + "::config", "layer % every", "(layer - 1) % every", "it is the last of six"
    ),
    "positions_stretched_twice": Fault(
        GEMMA3 + "::config",
        "is_within=True",
        "is_within=False",
        "the 131,072 positions of a file count its factor of 8 already",
    ),
    "all_layers_stretched": Fault(
        READER + "::ropes_by_layer_type",
        '{"rope_theta": number(hf, "rope_local_base_freq", local_theta), **local}',
        '{"rope_theta": number(hf, "rope_local_base_freq", local_theta), **local, **scaled}',
        "rope_scaling of an older file is of the layers that see all",
    ),
}
