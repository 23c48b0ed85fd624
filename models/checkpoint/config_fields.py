"""Account for every field of a config.json: it is read, has no effect, or is refused unless it is default.

Each family states its own fields beside its decoder, as `ConfigFields`; those of all families stand here. A
family sees only the fields that it reads, so that a field of another family changes nothing, as in
transformers. What no list has is unknown: it is named once where a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from borders.refusal import abbreviate
from models.checkpoint.huggingface import refused

READ = frozenset({
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "dtype", "torch_dtype", "eos_token_id"),
    *("quantization_config", "compression_config", "is_causal", "use_bidirectional_attention"),
    *("per_layer_config", "layer_types", "sliding_window", "attention_chunk_size"),
})  # fmt: skip
ROPE = frozenset({
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "partial_rotary_factor"),
    *("alpha", "llama_4_scaling_beta", "max_position_embeddings"),
    *("mrope_section", "mrope_interleaved"),  # a token of an image has three positions, one of a text one
})  # fmt: skip
_REASONS = {
    "it matters in training alone": (
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
        *("initializer_range", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise"),
        *("aux_loss_alpha", "seq_aux", "pretraining_tp", "ep_size"),
        *("gradient_checkpointing", "embedding_dropout"),
    ),
    "it chooses how transformers runs a model, or what it returns": (
        *("transformers_version", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("architectures", "auto_map", "torchscript", "use_bfloat16", "tf_legacy_loss"),
        *("cache_implementation", "attn_implementation", "name_or_path", "chunk_size_feed_forward"),
        *("return_dict_in_generate", "output_scores", "use_return_dict", "unsloth_version"),
    ),
    "it is of tasks other than the next token": (
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout"),
        *("task_specific_params", "tie_encoder_decoder", "cross_attention_hidden_size", "is_decoder"),
        *("decoder_start_token_id", "sep_token_id", "cls_token_id"),
    ),
    "the tokenizer's files say it": (
        *("bos_token_id", "pad_token_id", "unk_token_id", "tokenizer_class", "prefix"),
    ),
    "requests, or sampling defaults, say how tokens are chosen": (
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
        *("max_length", "min_length", "max_new_tokens", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("early_stopping", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens",),
    ),
}  # fmt: skip
IRRELEVANT = {name: reason for reason, names in _REASONS.items() for name in names}
# Fields that change what is computed, with the values that change nothing
FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a family beside those of all families.

    `read` name those that its decoder follows from, `fixed` those that must have one of these values, and
    `irrelevant` those without effect, with the reason; each counts before the lists of all families.
    `aliases` are other names of fields that it reads, as in transformers' attribute_map.
    """

    read: frozenset[str] = frozenset()
    irrelevant: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        lists = [self.read, self.irrelevant.keys(), self.fixed.keys(), self.aliases.keys()]
        names = [name for each in lists for name in each]
        assert len(names) == len(set(names)), "a field is in one list"

    def is_read(self, name: str) -> bool:
        """Whether the decoder follows from this field."""
        return name in self.read or (
            name in READ
            and name not in self.irrelevant
            and name not in self.fixed
            and name not in self.aliases
        )

    def reason(self, name: str) -> str | None:
        """Return why a field has no effect, or None for one that has, or that is unknown."""
        if self.is_read(name) or name in self.fixed or name in self.aliases:
            return None
        return self.irrelevant.get(name, IRRELEVANT.get(name))

    def read_of(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json that this family reads, by their own names.

        Raises ValueError for a field that cannot be honoured.
        """
        for name, allowed in (FIXED | dict(self.fixed)).items():
            if name in hf and not self.is_read(name) and hf[name] not in allowed:
                shown = " or ".join(abbreviate(value) for value in allowed if value is not None)
                raise refused(name, hf[name], f"it must be {shown}, or left out")
        found = {name: value for name, value in hf.items() if self.is_read(name)}
        for other, name in self.aliases.items():
            if hf.get(other) is None:
                continue
            if found.get(name) not in (None, hf[other]):
                raise refused(other, hf[other], f"{name} says {abbreviate(found[name])}: remove one")
            found[name] = hf[other]
        return found

    def unknown(self, hf: Mapping[str, Any]) -> list[str]:
        """Return the fields that no list has; names that begin with `_` are notes of programs."""
        return [*self._unknown(hf)]

    def _unknown(self, hf: Mapping[str, Any]) -> Iterator[str]:
        for name in hf:
            is_known = self.is_read(name) or name in self.fixed or name in self.aliases or name in FIXED
            if not (is_known or self.reason(name) or name.startswith("_")):
                yield name
        for key in ("rope_scaling", "rope_parameters"):
            rope = hf.get(key)
            if isinstance(rope, Mapping):
                parts = {f"{key}.{name}": part for name, part in rope.items() if isinstance(part, Mapping)}
                for place, part in (parts or {key: rope}).items():
                    yield from (f"{place}.{name}" for name in part if name not in ROPE)
