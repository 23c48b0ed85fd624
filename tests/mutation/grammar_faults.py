"""Which faults are seeded where answers are held to grammars?"""

from __future__ import annotations

from tests.mutation.fault import Fault

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

GRAMMAR_FAULTS = (
    Fault(
        "drafts_stay_consumed",
        CONSTRAINTS,
        "matcher.rollback(len(masks) - 1)",
        "matcher.rollback(0)",
        'vLLM #44006: "failed to advance FSM", for drafts that were refused have advanced it',
    ),
    Fault(
        "state_outlives_its_row",
        CONSTRAINTS,
        "if self._matcher is None or len(answer) < self._num_consumed:",
        "if self._matcher is None:",
        "an answer that is shorter than before is taken for one that goes on",
    ),
    Fault(
        "guess_fails_the_answer",
        CONSTRAINTS,
        "            self.leave()  # a guess led it there: the answer may go on elsewhere",
        "            self.error = matcher.error",
        "speculation ends requests that end well without it",
    ),
    Fault(
        "failed_grammar_lets_all_come",
        CONSTRAINTS,
        "        if self._has_failed(matcher):\n            return [NOTHING] * num_places",
        "        if self._has_failed(matcher):\n            return [None] * num_places",
        "an answer goes on without its form when its grammar grows too complex",
    ),
    Fault(
        "masks_of_other_guesses",
        CONSTRAINTS,
        "        return self._masks[: 1 + (int(differs[0]) if len(differs) else count)]",
        "        return self._masks",
        "what was made behind one guess is used behind another",
    ),
    Fault(
        "guesses_where_a_thread_works",
        CONSTRAINTS,
        "return self.making is not None and not self.making.is_done",
        "return False",
        "two threads move one matcher",
    ),
    Fault(
        "slow_guesses_are_asked_for_again",
        CONSTRAINTS,
        "if self._guesses_were_slow or self.is_slow:",
        "if self.is_slow:",
        "a grammar whose masks are quick and whose guesses are not holds up every step of all",
    ),
    Fault(
        "prompt_counts_for_the_grammar",
        MASK_MAKER,
        "slots.token_ids[row, num_prompt:last]",
        "slots.token_ids[row, 0:last]",
        "the grammar begins with the prompt",
    ),
    Fault(
        "late_for_ever_behind_another",
        MASK_MAKER,
        "elif job.is_begun or not again:",
        "else:",
        "who stands behind a mask that takes long waits as long",
    ),
    Fault(
        "first_token_late",
        MASK_MAKER,
        "first = [job for job in jobs if not len(job.answer)]",
        "first = [job for job in jobs if len(job.answer) < 0]",
        "a late first token is computed again in pages that others share",
    ),
    Fault(
        "late_row_goes_on",
        IN_FLIGHT,
        "        slots.num_computed[rows] = slots.num_tokens[rows] - 1\n        if len(batch.draft_starts)",
        "        if len(batch.draft_starts)",
        "a row whose mask is late never computes its last token again",
    ),
    Fault(
        "late_token_counts",
        DRAFTS,
        "if row not in ended and sampled.tokens[index] != LATE:",
        "if row not in ended:",
        "a late token behind right guesses becomes part of the answer",
    ),
    Fault(
        "highest_bit_lost",
        TOKEN_MASKS,
        "(words[:, :, None] & place) != 0",
        "(words[:, :, None] & place) > 0",
        "the last token of every 32 may come exactly where the sign says otherwise",
    ),
    Fault(
        "one_end_token",
        MATCHING,
        "eos_token=list(self._eos_token_ids)",
        "eos_token=list(self._eos_token_ids[:1])",
        "a model with two end tokens cannot end its answer with the other",
    ),
    Fault(
        "forced_tokens",
        MATCHING,
        '{"no_forcing": true}',
        '{"no_forcing": false}',
        "what must come may only come as its usual tokens, which behind other text may be others",
    ),
    Fault(
        "control_tokens_are_text",
        MATCHING,
        "self.special_token_ids = sorted(control | set(eos_token_ids))",
        "self.special_token_ids = sorted(set(eos_token_ids))",
        "an answer spells the markers of the template by control tokens",
    ),
    Fault(
        "endless_whitespace",
        MATCHING,
        '_WHITESPACE = r"(\\x20|\\n[\\x20\\t]{0,32})"',
        '_WHITESPACE = r"[\\x20\\n\\t]+"',
        "xgrammar and llguidance by default (vLLM #38696): a model writes spaces for ever",
    ),
    Fault(
        "unknown_keyword_ignored",
        JSON_SCHEMA,
        '        else:\n            problem = f"uses the keyword',
        '        elif keyword == "":\n            problem = f"uses the keyword',
        "sglang #40083: what a schema says is passed over in silence",
    ),
    Fault(
        "names_may_repeat",
        JSON_SCHEMA,
        'return least > max(1, len(schema.get("required", []))) and is_open',
        "return False and is_open",
        "a name that comes twice counts as two properties",
    ),
    Fault(
        "steep_multiples",
        JSON_SCHEMA,
        "value <= 0 or _digits(value) > LARGEST_STEP",
        "value <= 0 or _digits(value) < 0",
        "multipleOf: 9999991 takes minutes to compile",
    ),
    Fault(
        "second_form_ignored",
        ASKED,
        "if len(given) > 1:",
        "if len(given) > len(FIELDS):",
        "of two forms one is passed over",
    ),
    Fault(
        "late_grammar_waited_for",
        GRAMMAR_QUEUE,
        "if now_s - each.begun_s < self._most_s:",
        "if now_s > 0:",
        "a grammar that takes for ever is waited for as long (vLLM #54003)",
    ),
    Fault(
        "end_while_compiling_lost",
        GRAMMAR_QUEUE,
        "                each.ends[stream] = reason\n",
        "",
        "who goes away while his grammar is compiled is answered to the end",
    ),
)
