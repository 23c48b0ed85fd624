"""Describe the fields of an answer in words, for the second table of docs/request_fields.md."""

from __future__ import annotations

ANSWER_FIELDS = (  # fields of a line that `scripts.generate` writes
    (("id", "index"), "the request's; which of its answers, where `n` is above 1"),
    (("token_ids",), "the tokens, with the one that ended the answer"),
    (
        ("text",),
        "the text, without it (see `include_stop_str_in_output`); null where the model has no tokenizer",
    ),
    (
        ("finish_reason",),
        "`stop`: an end token or a stop string; `length`: `max_tokens`; `timeout`: its `timeout_s`, or a "
        "limit on its wait",
    ),
    (("logprobs",), "if asked for: each token, its log-probability, and the likeliest ones"),
    (
        ("prompt_logprobs",),
        "if asked for: null for the first token of the prompt, and the same of each other",
    ),
    (
        ("score", "cumulative_logprob"),
        "of a beam search, best first: what answers are ranked by; the log-probability of all tokens",
    ),
    (
        ("num_prompt_tokens", "num_cached_tokens"),
        "the prompt's tokens; how many of them were found in pages of earlier requests",
    ),
    (
        ("num_drafted", "num_accepted"),
        "guesses of its tokens that were checked (`speculation.kind`); how many of them were right",
    ),
    (
        ("arrival_s", "first_token_s", "finish_s"),
        "in seconds from the start: when it arrived, when its first and its last token were there",
    ),
    (
        ("embedding",),
        "with `pooling`, in place of tokens, text and reason: numbers whose squares add up to 1",
    ),
    (("label_logprobs",), "with `label_token_ids`, in place of the embedding: of each, the log-probability"),
    (("error",), "in place of all but `id`: why the request was refused or failed"),
)
