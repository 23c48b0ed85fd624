"""Which faults are seeded where answers call tools?"""

from __future__ import annotations

from tests.mutation.fault import Fault

TOOLS = "serving/tools/"
PARSING, GRAMMAR, DEFINITIONS = (TOOLS + name for name in ("parsing.py", "grammar.py", "definitions.py"))
CHAT, REASONING = "serving/api/chat.py", TOOLS + "reasoning.py"
TOKENIZER = "serving/text/tokenizer.py"
SERVED = "tests/serving/test_tools.py"
THINKING = "serving/grammars/thinking.py"
TOOL_TESTS_OF = {
    THINKING: ("tests/serving/test_thinking.py",),
    PARSING: ("tests/serving/test_tool_parsing.py",),
    GRAMMAR: ("tests/serving/test_tool_grammars.py",),
    DEFINITIONS: ("tests/serving/test_tool_grammars.py",),
    CHAT: (SERVED,),
    TOKENIZER: (SERVED, "tests/serving/test_reasoning.py"),
    REASONING: ("tests/serving/test_reasoning.py",),
}

TOOL_FAULTS = (
    Fault(
        "thoughts_without_a_bound",
        THINKING,
        "self._num_thoughts >= budget",
        "self._num_thoughts > budget",
        "a budget of thoughts is not kept",
    ),
    Fault(
        "thoughts_counted_that_were_taken_back",
        THINKING,
        'self._num_thoughts -= taken.count("thought")',
        "pass",
        "guesses that were wrong use up the budget",
    ),
    Fault(
        "an_answer_ends_in_its_thoughts",
        THINKING,
        "return None if self._follows is None else ~self._of(sorted(self._end_tokens))",
        "return None",
        "an answer that is to be JSON may end before it begins",
    ),
    Fault(
        "form_before_the_thoughts",
        THINKING,
        "        wide[: self._num_words] |= self._of([self._thinking.begin])\n",
        "",
        "a model that would think first must answer at once",
    ),
    Fault(
        "form_forgets_what_was_taken_back",
        THINKING,
        "            self._follows.rollback(num_answer)\n",
        "            pass\n",
        "behind a wrong guess the form goes on elsewhere",
    ),
    Fault(
        "undecided_call_is_shown",
        PARSING,
        "shown = at + 1 if end == _NO else at",
        "shown = at + 1 if end < 0 else at",
        "vLLM #43436: a marker that is cut in two pieces is shown as text, and its call is lost",
    ),
    Fault(
        "any_name_is_a_call",
        PARSING,
        "if name not in self._names:",
        "if not name:",
        "a function that the client does not have is called",
    ),
    Fault(
        "escaped_quote_ends_a_string",
        PARSING,
        'elif char == "\\\\":',
        'elif char == "\\0":',
        "brackets in a string with an escaped quote end the arguments",
    ),
    Fault(
        "spoilt_keywords_are_lost",
        PARSING,
        "parsed.say(self._lead + self._scan.text)\n            self._resume()",
        "parsed.say(self._scan.text)\n            self._resume()",
        "what only looked like a call loses its beginning",
    ),
    Fault(
        "single_call_is_repeated",
        GRAMMAR,
        'more = "" if is_single else',
        'more = "" if not schemas else',
        "a named function is called twice",
    ),
    Fault(
        "keywords_may_leave_out_what_is_required",
        GRAMMAR,
        'skip = "" if each in required else',
        'skip = "" if not required else',
        "a call in Python's form lacks a required argument",
    ),
    Fault(
        "strict_schema_is_let_go",
        DEFINITIONS,
        "        if is_strict:\n            raise",
        "        if not is_strict:\n            raise",
        "a strict tool whose schema cannot be enforced is served as any object",
    ),
    Fault(
        "every_piece_names_its_call",
        CHAT,
        "if call.name is None:",
        "if call.arguments is None:",
        "OpenAI's client would join the ids of all pieces",
    ),
    Fault(
        "calls_end_with_stop",
        CHAT,
        'is_called = delta.finish_reason == "stop"',
        'is_called = delta.finish_reason == "length"',
        "an agent takes the answer for its last",
    ),
    Fault(
        "cut_end_of_thoughts_is_shown",
        REASONING,
        "kept = next((size for size in sizes if self._held.endswith(END[:size])), 0)",
        "kept = 0 * len(sizes)",
        "vLLM #32152: an end mark in two deltas leaves the whole answer in the thoughts",
    ),
    Fault(
        "thoughts_begin_anywhere",
        REASONING,
        "if not begun.startswith(BEGIN):",
        "if BEGIN not in begun:",
        "an answer that only speaks of the mark is cut at it",
    ),
    Fault(
        "opened_thoughts_are_an_answer",
        TOKENIZER,
        "return self._end_of(prompt).endswith(BEGIN)",
        "return self._end_of(prompt) == BEGIN",
        "vLLM #53284: where the template opens the block, thoughts are shown as the answer",
    ),
)
