"""Faults of packed and rounded weights, and of what single families do otherwise."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "weights_of_one_seed": Fault(
        "models/checkpoint/weights.py::random",
        "_seed_of(decoder, name, seed)",
        "seed",
        "all layers have the same weights",
        "tests/models/test_weights.py::test_random_weights_follow_their_seed",
    ),
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
    "group_of_an_input_passed_over": Fault(
        "models/checkpoint/unpacking.py::Unpacking._groups",
        "found[self.layout.group].long()",
        "torch.arange(len(found[self.layout.group])) // (self.form.group_size or self.shape[1])",
        "inputs that were reordered have the scales of others",
        "tests/models/test_packed_weights.py::test_what_autogptq_wrote_is_what_it_was_given",
    ),
    "bias_passed_over": Fault(
        "models/checkpoint/unpacking.py::Unpacking._apart",
        "BIAS in found and bool(found[BIAS].any())",
        "False",
        "a bias of the checkpoint is silently left out",
        "tests/models/test_packed_weights.py::test_a_bias_of_nothing_is_passed_over_and_another_refused",
    ),
    "kept_nibbles_the_other_way_round": Fault(
        "models/ops/operands.py::in_words",
        "values[:, ::2] | values[:, 1::2] << 4",
        "values[:, 1::2] | values[:, ::2] << 4",
        "neighbours change places",
        "tests/models/test_int4.py::test_numbers_and_scales_are_those_of_the_file",
    ),
    "zero_and_middle_exchanged": Fault(
        "models/checkpoint/unpacking.py::Unpacking.int4",
        "MIDDLE - zeros[:, groups]",
        "zeros[:, groups] - MIDDLE",
        "every weight of a group is off by twice its zero",
        "tests/models/test_int4.py::test_numbers_and_scales_are_those_of_the_file",
    ),
    "a_group_on_two_ranks": Fault(
        "models/checkpoint/int4.py::check_groups",
        "inputs // ranks",
        "inputs",
        "a rank's words begin within a group",
        "tests/models/test_int4.py::test_ranks_do_not_divide_a_group",
    ),
    "quantised_bias_on_every_rank": Fault(
        "models/checkpoint/weights.py::placed",
        '"bias" if kind == "quant_bias" else kind',
        "kind",
        "ranks that share a sum add the quantised bias of a linear once each",
        "tests/models/test_modelslim.py::test_ranks_add_a_quantised_bias_once",
    ),
    "pairs_turned": Fault(
        "models/ops/operands.py::unpaired",
        "torch.stack((pairs << 4 >> 4, pairs >> 4), 1)",
        "torch.stack((pairs >> 4, pairs << 4 >> 4), 1)",
        "neighbouring outputs of experts in 4 bits change places",
        "tests/models/test_modelslim.py::test_an_engine_gives_the_tokens_that_the_arithmetic_gives",
    ),
    "one_input_scale_for_all": Fault(
        "models/ops/operands.py::StaticInt8.parts",
        "{stop, *(each for each in alike if first < each < stop)}",
        "{stop}",
        "gate and up are multiplied with rows that are quantised for the gate",
        "tests/models/test_modelslim.py::test_answers_are_those_of_the_arithmetic",
    ),
    "offset_of_a_weight_unseen": Fault(
        "models/checkpoint/modelslim.py::Unused.take",
        "self.must_be_zero and bool(tensor.any())",
        "False",
        "weights that are not symmetric are read as if they were",
        "tests/models/test_modelslim.py::test_weights_that_are_not_symmetric_are_refused",
    ),
    "norm_bias_left_out": Fault(
        "models/decoder.py::DecoderLayer._add_norm",
        "bias is not None",
        "False",
        "what an exporter moved into biases of norms is lost",
        "tests/models/test_modelslim.py::test_ranks_add_a_quantised_bias_once",
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
    "int8_scale_not_planned": Fault(
        "models/config.py::DecoderConfig.layer_cache",
        "heads * scale_bytes",
        "0",
        "the plan holds more pages than the memory does",
        "tests/attention/test_int8_pages.py::test_a_page_takes_as_many_bytes_as_are_planned",
    ),
    "logit_cap_not_multiplied": Fault(
        "models/decoder.py::Decoder.head_logits",
        "(logits / cap).tanh() * cap",
        "(logits / cap).tanh()",
        "greedy tokens stay, and chances do not",
        "tests/models/test_stored_otherwise.py::test_a_prompt_scores_as_in_transformers",
    ),
    "kernel_cap_not_multiplied": Fault(
        "attention/cuda/triton_kernels.py::_read",
        "CAP * LOG2_E",
        "LOG2_E",
        "scores lie between -1 and 1, whatever the cap",
        "tests/attention/test_cuda.py::test_sinks_and_caps_of_scores",
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
    "gelu_lost_in_int8": Fault(
        "models/layers/mlp.py::MLP.joins_int8",
        "self.is_swiglu and self.gate_up.takes_int8 and self.down.takes_int8",
        "self.gate_up.takes_int8 and self.down.takes_int8",
        "the operator that joins gate and rounding knows no other gate",
        "tests/models/test_gemma3.py::test_in_int8_it_is_gated_by_the_same_function",
    ),
    "narrowed_unlooked": Fault(
        "models/ops/cpu/products.py::narrowed",
        "half if torch.equal(half.float(), weight) else weight",
        "half",
        "weights of float32 whose first numbers fit into bfloat16 are rounded",
        "tests/models/test_cpu_products.py::test_numbers_of_bfloat16_are_kept_as_such",
    ),
    "stored_type_where_onednn_is_faster": Fault(
        "models/ops/cpu/ops.py::CpuOps.pack",
        "self.batch_invariant or not _multiplies(weight.dtype)",
        "True",
        "a processor that multiplies bfloat16 does so at half of its speed",
        "tests/models/test_cpu_products.py::test_a_processor_that_multiplies_a_type_itself_keeps_oneDNN",
    ),
    "parts_begin_at_a_rows_own_first_tile": Fault(
        "attention/cpu/tiles.py::DecodeTiles.of",
        "(lows // tile).astype(np.int64)",
        "(0 * lows).astype(np.int64)",
        "behind a window, a decode sums in other parts than the prompt that it goes on from",
        "tests/attention/test_cpu_source.py::test_a_query_has_the_same_bits_however_its_prompt_is_cut",
    ),
    "window_read_from_the_first_page": Fault(
        "attention/cpu/tiles.py::PromptTiles.of",
        "np.cumsum(counts) - counts - lows",
        "np.cumsum(counts) - counts",
        "a chunk behind a window reads the pages behind its own",
        "tests/attention/test_cpu_source.py::test_a_query_has_the_same_bits_however_its_prompt_is_cut",
    ),
}
