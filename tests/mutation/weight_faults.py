"""Faults of packed and rounded weights, and of what single families do otherwise."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "nibbles_the_other_way_round": Fault(
        "models/checkpoint/unpacking.py::Unpacking._values",
        "(octets & 15, octets >> 4)",
        "(octets >> 4, octets & 15)",
        "neighbours change places",
        "tests/models/test_packed_weights.py::test_what_autoawq_wrote_is_what_it_was_given",
    ),
    "zero_not_less_one": Fault(
        "models/packing.py::_gptq",
        'kind == "gptq"',
        'kind == "gptq_v2"',
        "every weight is off by a step",
        "tests/models/test_packed_weights.py::test_the_model_answers_as_with_the_numbers_that_are_stored",
    ),
    "group_counted_from_the_rank_s_first_input": Fault(
        "models/checkpoint/unpacking.py::Unpacking._groups",
        "torch.arange(self.columns.start, self.columns.stop)",
        "torch.arange(self.columns.stop - self.columns.start)",
        "the second rank's weights have the first one's scales",
        "tests/models/test_packed_weights.py::test_each_rank_makes_its_part",
    ),
    "pairs_turned": Fault(
        "models/ops/operands.py::unpaired",
        "torch.stack((pairs << 4 >> 4, pairs >> 4), 1)",
        "torch.stack((pairs >> 4, pairs << 4 >> 4), 1)",
        "neighbouring outputs of experts in 4 bits change places",
        "tests/models/test_modelslim.py::test_an_engine_gives_the_tokens_that_the_arithmetic_gives",
    ),
    "offset_of_a_weight_unseen": Fault(
        "models/checkpoint/modelslim.py::Unused.take",
        "self.must_be_zero and bool(tensor.any())",
        "False",
        "weights that are not symmetric are read as if they were",
        "tests/models/test_modelslim.py::test_weights_that_are_not_symmetric_are_refused",
    ),
    "head_reads_rotated_states": Fault(
        "recipes/assembly/decoders.py::draft_decoder",
        "rotation_of(config.quantization, config.hidden_size)",
        "None",
        "a head guesses from hidden states that it was not trained with",
        "tests/models/test_modelslim_drafts.py::test_a_head_reads_rotated_hidden_states_as_the_published_one_reads_plain_ones",
    ),
    "int8_truncated": Fault(
        "devices/int8.py::quantize_rows",
        "(wide / scale).round()",
        "wide / scale",
        "a cast rounds towards zero: twice the error, and every number too small",
        "tests/attention/test_int8_pages.py::test_numbers_are_nearest_by_the_scale_of_their_own_head",
    ),
    "int8_scale_not_swapped": Fault(
        "kv_cache/device/storage.py::_exchange",
        "source, target = _flat(source, stays=stays), _flat(target, stays=stays)",
        (
            "is_int8 = source.dtype == torch.int8\n"
            "source, target = _flat(source, stays=stays), _flat(target, stays=stays)\n"
            "if is_int8:\n"
            "    source, target = (e.view(torch.int8)[..., :-4] for e in (source, target))"
        ),
        "what comes back from the host has the scales of the page's last owner",
        "tests/kv_cache/test_storage.py::test_planes_of_unlike_types_and_a_layer_of_one",
    ),
    "sink_left_out_of_prompts": Fault(
        "attention/cpu/attention.py::CpuAttention._weigh",
        "weights.sum(-1) + sunk",
        "weights.sum(-1)",
        "the weights of keys add up to one",
        "tests/attention/test_attention.py::test_sinks_and_caps_of_scores",
    ),
    "one_base_for_all_layers": Fault(
        "models/decoder.py::Decoder.forward",
        "0 if self.part.layers[number].window is None else -1",
        "0",
        "layers with a window are turned as those that see all",
        "tests/models/test_stored_otherwise.py::test_a_prompt_scores_as_in_transformers",
    ),
    "one_added_to_norms_of_layers_alone": Fault(
        "models/checkpoint/weights.py::placed",
        "name.endswith(NORM_ENDS)",
        'name.endswith("layernorm.weight")',
        "norms of heads and the last one are about 0, not about 1",
        "tests/models/test_stored_otherwise.py::test_a_prompt_scores_as_in_transformers",
    ),
    "narrowed_unlooked": Fault(
        "models/ops/cpu/products.py::narrowed",
        "half if torch.equal(half.float(), weight) else weight",
        "half",
        "weights of float32 whose first numbers fit into bfloat16 are rounded",
        "tests/models/test_cpu_products.py::test_numbers_of_bfloat16_are_kept_as_such",
    ),
    "pairs_of_rows_that_lie_at_odd_places": Fault(
        "models/ops/cpu/products.py::Products.multiply",
        "rows.stride(-1) != 1 or (is_paired and rows.stride(0) % 2)",
        "rows.stride(-1) != 1",
        "every second row is read from the number before its own",
        "tests/models/test_cpu_products.py::test_pairs_of_bfloat16_are_multiplied_as_they_are",
    ),
    "window_read_from_the_first_page": Fault(
        "attention/cpu/tiles.py::PromptTiles.of",
        "np.cumsum(counts) - counts - lows",
        "np.cumsum(counts) - counts",
        "a chunk behind a window reads the pages behind its own",
        "tests/attention/test_cpu_source.py::test_a_query_has_the_same_bits_however_its_prompt_is_cut",
    ),
    "scale_of_a_rank_s_own_inputs": Fault(
        "models/layers/linear.py::Linear.round_to",
        "part.abs()",
        "part[:, inputs].abs()",
        "ranks scale the rows of a sum each by its own part of them",
        "tests/models/test_spread_experts.py::test_spread_experts_in_int8_have_the_weights_of_one_rank",
    ),
    "kept_in_any_order": Fault(
        "recipes/assembly/decoders.py::kept_weights",
        "[each.joins for each in module.modules() if isinstance(each, LatentSelfAttention)]",
        "[]",
        "heads get the queries of others where an NPU was found to join latents since",
        "tests/models/test_kept_weights.py::test_rows_in_another_order_are_not_taken",
    ),
    "kept_for_any_checkpoint": Fault(
        "models/checkpoint/kept_weights.py::origin_of",
        "sorted(each for each in folder.iterdir() if each.is_file())",
        "[]",
        "the weights of a checkpoint that has changed since are taken for its own",
        "tests/models/test_kept_weights.py::test_the_next_engine_of_a_recipe_takes_them",
    ),
    "kept_by_anyone": Fault(
        "models/checkpoint/kept_weights.py::_opened",
        "not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022",
        "False",
        "whoever can write to the folder chooses the weights",
        "tests/models/test_kept_weights.py::test_a_file_that_is_not_right_is_replaced",
    ),
}
