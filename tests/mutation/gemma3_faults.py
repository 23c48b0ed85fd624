"""Which faults are seeded in what Gemma 3 alone has?"""

from __future__ import annotations

from tests.mutation.fault import Fault

GEMMA3, MLP, READER = "recipes/gemma3/model.py", "models/mlp.py", "models/huggingface.py"
GEMMA3_TESTS_OF = dict.fromkeys(
    (GEMMA3, MLP, READER), ("tests/models/test_gemma3.py", "tests/models/test_stored_otherwise.py")
)

GEMMA3_FAULTS = (
    Fault(
        "one_base_for_all_layers",
        "models/decoder.py",
        "turns[0 if self.part.windows[number] is None else -1]",
        "turns[0]",
        "layers with a window are turned as those that see all",
    ),
    Fault(
        "one_added_to_norms_of_layers_alone",
        "models/weights.py",
        'name.endswith("norm.weight")',
        'name.endswith("layernorm.weight")',
        "norms of heads and the last one are about 0, not about 1",
    ),
    Fault(
        "gelu_lost_in_int8",
        MLP,
        "self.is_swiglu and self.gate_up.takes_int8",
        "self.gate_up.takes_int8",
        "the operator that joins gate and rounding knows no other gate",
    ),
    Fault(
        "scores_by_the_size_of_a_head",
        GEMMA3,
        'own_scale=integer(hf, "query_pre_attn_scalar", 256) ** -0.5',
        "own_scale=plain.head_dim**-0.5",
        "of the 27B alone the two differ",
    ),
    Fault(
        "norms_change_places",
        GEMMA3,
        '"pre_feedforward", "post_attention", "post',
        '"post_attention", "pre_feedforward", "post',
        "as in Llama, where the norm after attention is the one before the MLP",
    ),
    Fault(
        "first_layer_sees_all",
        GEMMA3,
        "layer % every",
        "(layer - 1) % every",
        "it is the last of six",
    ),
    Fault(
        "positions_stretched_twice",
        GEMMA3,
        "is_within=True",
        "is_within=False",
        "the 131,072 positions of a file count its factor of 8 already",
    ),
    Fault(
        "all_layers_stretched",
        READER,
        "local_theta), **local}",
        "local_theta), **local, **scaled}",
        "rope_scaling of an older file is of the layers that see all",
    ),
)
