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

TOOL_FAULTS = {
    "thoughts_without_a_bound": Fault(
        THINKING + "::ThinkingMatcher._must_end",
        "self._num_thoughts >= budget",
        "self._num_thoughts > budget",
        "a budget of thoughts is not kept",
    ),
    "thoughts_counted_that_were_taken_back": Fault(
        THINKING + "::ThinkingMatcher.rollback",
        'self._num_thoughts -= taken.count("thought")',
        "pass",
        "guesses that were wrong use up the budget",
    ),
    "an_answer_ends_in_its_thoughts": Fault(
        THINKING + "::ThinkingMatcher.mask",
        "None if self._follows is None else ~self._of(sorted(self._end_tokens))",
        "None",
        "an answer that is to be JSON may end before it begins",
    ),
    "form_before_the_thoughts": Fault(
        THINKING + "::ThinkingMatcher.mask",
        "wide[: self._num_words] |= self._of([self._thinking.begin])",
        "",
        "a model that would think first must answer at once",
    ),
    "form_forgets_what_was_taken_back": Fault(
        THINKING + "::ThinkingMatcher.rollback",
        "self._follows.rollback(num_answer)",
        "pass",
        "behind a wrong guess the form goes on elsewhere",
    ),
    "undecided_call_is_shown": Fault(
        PARSING + "::ToolParser._in_content",
        "end == _NO",
        "end < 0",
        "vLLM #43436: a marker that is cut in two pieces is shown as text, and its call is lost",
    ),
    "any_name_is_a_call": Fault(
        PARSING + "::ToolParser._begun",
        "name not in self._names",
        "not name",
        "a function that the client does not have is called",
    ),
    "escaped_quote_ends_a_string": Fault(
        PARSING + "::_Scan._step",
        'char == "\\\\"',
        'char == "\\0"',
        "brackets in a string with an escaped quote end the arguments",
    ),
    "spoilt_keywords_are_lost": Fault(
        PARSING + "::ToolParser._in_keywords",
        "self._lead + self._scan.text",
        "self._scan.text",
        "what only looked like a call loses its beginning",
    ),
    "single_call_is_repeated": Fault(
        GRAMMAR + "::lark_of", "is_single", "not schemas", "a named function is called twice"
    ),
    "keywords_may_leave_out_what_is_required": Fault(
        GRAMMAR + "::_arguments",
        "each in required",
        "not required",
        "a call in Python's form lacks a required argument",
    ),
    "strict_schema_is_let_go": Fault(
        DEFINITIONS + "::_enforced",
        "is_strict",
        "not is_strict",
        "a strict tool whose schema cannot be enforced is served as any object",
    ),
    "every_piece_names_its_call": Fault(
        CHAT + "::ChatFormat._call_event",
        "call.name is None",
        "call.arguments is None",
        "OpenAI's client would join the ids of all pieces",
    ),
    "calls_end_with_stop": Fault(
        CHAT + "::ChatFormat._choice",
        'delta.finish_reason == "stop"',
        'delta.finish_reason == "length"',
        "an agent takes the answer for its last",
    ),
    "cut_end_of_thoughts_is_shown": Fault(
        REASONING + "::ReasoningParser._thoughts",
        "next((size for size in sizes if self._held.endswith(END[:size])), 0)",
        "0 * len(sizes)",
        "vLLM #32152: an end mark in two deltas leaves the whole answer in the thoughts",
    ),
    "thoughts_begin_anywhere": Fault(
        REASONING + "::ReasoningParser.push",
        "not begun.startswith(BEGIN)",
        "BEGIN not in begun",
        "an answer that only speaks of the mark is cut at it",
    ),
    "opened_thoughts_are_an_answer": Fault(
        TOKENIZER + "::Text.opens_thoughts",
        "self._end_of(prompt).endswith(BEGIN)",
        "self._end_of(prompt) == BEGIN",
        "vLLM #53284: where the template opens the block, thoughts are shown as the answer",
    ),
}
