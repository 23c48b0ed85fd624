"""Which faults are seeded where answers are held to grammars?"""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

CONSTRAINTS, TOKEN_MASKS = "continuous_batching/constraints.py", "models/sampling/token_masks.py"
GRAMMARS = "serving/grammars/"
MATCHING, JSON_SCHEMA, ASKED = (
    GRAMMARS + name for name in ("matching.py", "json_schema.py", "structured_output.py")
)
GRAMMAR_QUEUE = "serving/engine/grammar_queue.py"
MASK_MAKER = "continuous_batching/sampling/mask_maker.py"
IN_FLIGHT, DRAFTS = "continuous_batching/scheduling/in_flight.py", "continuous_batching/sampling/drafts.py"
SCHEDULES = "tests/serving/test_constrained_schedules.py"
GRAMMAR_TESTS_OF = {
    CONSTRAINTS: (
        "tests/continuous_batching/test_constraints.py",
        "tests/continuous_batching/test_mask_maker.py",
    ),
    MASK_MAKER: ("tests/continuous_batching/test_mask_maker.py", SCHEDULES),
    TOKEN_MASKS: (SCHEDULES,),
    MATCHING: ("tests/serving/test_grammar_masks.py", "tests/serving/test_schema_answers.py"),
    JSON_SCHEMA: ("tests/serving/test_grammar_fields.py",),
    ASKED: ("tests/serving/test_grammar_fields.py",),
    GRAMMAR_QUEUE: ("tests/serving/test_grammar_queue.py",),
}

GRAMMAR_FAULTS = {
    "drafts_stay_consumed": Fault(
        CONSTRAINTS + "::Constraint.masks",
        "len(masks) - 1",
        "0",
        'vLLM #44006: "failed to advance FSM", for drafts that were refused have advanced it',
    ),
    "state_outlives_its_row": Fault(
        CONSTRAINTS + "::Constraint._at",
        "self._matcher is None or len(answer) < self._num_consumed",
        "self._matcher is None",
        "an answer that is shorter than before is taken for one that goes on",
    ),
    "guess_fails_the_answer": Fault(
        CONSTRAINTS + "::Constraint.masks",
        "self.leave()",
        "self.error = matcher.error",
        "speculation ends requests that end well without it",
    ),
    "failed_grammar_lets_all_come": Fault(
        CONSTRAINTS + "::Constraint.masks",
        "if self._has_failed(matcher):\n    return [NOTHING] * num_places",
        "if self._has_failed(matcher):\n    return [None] * num_places",
        "an answer goes on without its form when its grammar grows too complex",
    ),
    "masks_of_other_guesses": Fault(
        CONSTRAINTS + "::Making.masks_for",
        "self._masks[: 1 + (int(differs[0]) if len(differs) else count)]",
        "self._masks",
        "what was made behind one guess is used behind another",
    ),
    "guesses_where_a_thread_works": Fault(
        CONSTRAINTS + "::Constraint._is_out_of_reach",
        "self.making is not None and not self.making.is_done",
        "False",
        "two threads move one matcher",
    ),
    "slow_guesses_are_asked_for_again": Fault(
        CONSTRAINTS + "::Constraint._is_out_of_reach",
        "self._guesses_were_slow or self.is_slow",
        "self.is_slow",
        "a grammar whose masks are quick and whose guesses are not holds up every step of all",
    ),
    "prompt_counts_for_the_grammar": Fault(
        MASK_MAKER + "::_places",
        "slots.token_ids[row, num_prompt:last]",
        "slots.token_ids[row, 0:last]",
        "the grammar begins with the prompt",
    ),
    "late_for_ever_behind_another": Fault(
        MASK_MAKER + "::MaskMaker._begin",
        "if job.is_begun or not again: ...",
        "...",
        "who stands behind a mask that takes long waits as long",
    ),
    "first_token_late": Fault(
        MASK_MAKER + "::MaskMaker._wait",
        "not len(job.answer)",
        "len(job.answer) < 0",
        "a late first token is computed again in pages that others share",
    ),
    "late_row_goes_on": Fault(
        IN_FLIGHT + "::InFlight.put_off",
        "slots.num_computed[rows] = slots.num_tokens[rows] - 1",
        "",
        "a row whose mask is late never computes its last token again",
    ),
    "late_token_counts": Fault(
        DRAFTS + "::book_drafts",
        "row not in ended and sampled.tokens[index] != LATE",
        "row not in ended",
        "a late token behind right guesses becomes part of the answer",
    ),
    "highest_bit_lost": Fault(
        TOKEN_MASKS + "::unpacked",
        "(words[:, :, None] & place) != 0",
        "(words[:, :, None] & place) > 0",
        "the last token of every 32 may come exactly where the sign says otherwise",
    ),
    "one_end_token": Fault(
        MATCHING + "::Grammars._ready",
        "list(self._eos_token_ids)",
        "list(self._eos_token_ids[:1])",
        "a model with two end tokens cannot end its answer with the other",
    ),
    "forced_tokens": TextFault(
        MATCHING,
        '{"no_forcing": true}',
        '{"no_forcing": false}',
        "what must come may only come as its usual tokens, which behind other text may be others",
    ),
    "control_tokens_are_text": Fault(
        MATCHING + "::_Tokens.__init__",
        "control | set(eos_token_ids)",
        "set(eos_token_ids)",
        "an answer spells the markers of the template by control tokens",
    ),
    "endless_whitespace": Fault(
        MATCHING,
        'r"(\\x20|\\n[\\x20\\t]{0,32})"',
        'r"[\\x20\\n\\t]+"',
        "xgrammar and llguidance by default (vLLM #38696): a model writes spaces for ever",
    ),
    "unknown_keyword_ignored": Fault(
        JSON_SCHEMA + "::SchemaCheck._value",
        "if keyword in _PLAIN: ...\nelse: ...",
        'if keyword in _PLAIN: ...\nelif keyword == "": ...',
        "sglang #40083: what a schema says is passed over in silence",
    ),
    "names_may_repeat": Fault(
        JSON_SCHEMA + "::_may_repeat_names",
        'least > max(1, len(schema.get("required", [])))',
        "False",
        "a name that comes twice counts as two properties",
    ),
    "steep_multiples": Fault(
        JSON_SCHEMA + "::SchemaCheck._value",
        "_digits(value) > LARGEST_STEP",
        "_digits(value) < 0",
        "multipleOf: 9999991 takes minutes to compile",
    ),
    "second_form_ignored": Fault(
        ASKED + "::grammar_of",
        "len(given) > 1",
        "len(given) > len(FIELDS)",
        "of two forms one is passed over",
    ),
    "late_grammar_waited_for": Fault(
        GRAMMAR_QUEUE + "::GrammarQueue._lateness",
        "now_s - each.begun_s < self._most_s",
        "now_s > 0",
        "a grammar that takes for ever is waited for as long (vLLM #54003)",
    ),
    "end_while_compiling_lost": Fault(
        GRAMMAR_QUEUE + "::GrammarQueue.end",
        "each.ends[stream] = reason",
        "",
        "who goes away while his grammar is compiled is answered to the end",
    ),
}
