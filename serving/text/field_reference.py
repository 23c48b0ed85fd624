"""Write the tables of docs/request_fields.md: the fields of a request, of an answer and of other engines.

    python -m serving.text.field_reference

borders/field_table.py declares the fields of a request, borders/foreign_fields.py those of other engines.
"""

from __future__ import annotations

from borders.field_table import FIELDS, RequestField
from borders.foreign_fields import foreign_table
from recipes.schema import verb

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


def request_table() -> str:
    """Return the fields of a request as a Markdown table."""
    head = ["| field | allowed | default | meaning | also taken by |", "|---|---|---|---|---|"]
    cells = [
        [f"`{e.name}`", e.kind.allowed, _default(e), e.meaning, ", ".join(e.forms)] for e in FIELDS.values()
    ]
    rows = [f"| {' | '.join(each)} |" for each in cells]
    return "\n".join(head + rows) + "\n"


def answer_table() -> str:
    """Return the fields of a line of answers as a Markdown table."""
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |" for names, meaning in ANSWER_FIELDS]
    return "\n".join(["| field | meaning |", "|---|---|", *rows]) + "\n"


def _default(field: RequestField) -> str:
    """Return the default as JSON writes it, or in words."""
    value = field.stated
    return (
        str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else f"{value:g}"
    )


if __name__ == "__main__":
    verb.run(lambda _: print(f"{request_table()}\n{answer_table()}\n{foreign_table()}", end=""))
