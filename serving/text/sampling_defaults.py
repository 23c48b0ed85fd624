"""Read the sampling defaults of a checkpoint, which count where a request leaves a field out.

They are those of generation_config.json, or else of config.json, where older versions of transformers wrote
them. As in vLLM and in transformers' generate, a request's own fields go before them, and a file that says
`do_sample: false` asks for the likeliest tokens. `model.generation_config: none` in a recipe switches them
off. What else generate would do by such a file, a beam search for one, is left to requests and named once in
the log.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from borders.field_table import FIELDS
from borders.files import is_there, optional_json_object
from borders.refusal import BadRequest, abbreviate
from recipes.schema.recipe import Recipe

log = logging.getLogger(__name__)

NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
NAMES |= {"max_new_tokens": "max_tokens"}
# Fields of generate that change its answers, with the values that change nothing
_OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "num_return_sequences", "encoder_repetition_penalty"), (1,)
    ),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("typical_p", "top_h", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "stop_strings", "dola_layers"), ([], "")),
}

# A config.json may state all defaults of transformers, which then say nothing of the model
_UNSAID = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
_UNSAID |= {"typical_p": 1.0, "max_length": 20, "num_beams": 1}


def sampling_defaults(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of requests that the checkpoint of a recipe has a default of its own for.

    `max_tokens` counts where an answer would else be as long as the model allows. Raises ValueError for a
    value that no request could have.
    """
    folder = recipe.model.path
    if folder is None or recipe.model.generation_config == "none":
        return {}
    path = Path(folder) / "generation_config.json"
    said = optional_json_object(path)
    if not is_there(path):
        path = Path(folder) / "config.json"
        said = {key: value for key, value in optional_json_object(path).items() if value != _UNSAID.get(key)}
    said = {key: value for key, value in said.items() if value is not None}
    if ignored := [key for key, off in _OTHERS.items() if key in said and said[key] not in off]:
        log.warning("%s: no default of requests is %s; requests may ask for it", path, ", ".join(ignored))
    found: dict[str, Any] = {}
    for key, name in NAMES.items():
        if key in said:
            try:
                found[name] = FIELDS[name].kind.read(name, said[key])
            except BadRequest as error:
                fix = "correct the file, or set model.generation_config: none"
                raise ValueError(f"{path} has {key}: {abbreviate(said[key])}; {error}: {fix}") from error
    if said.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
