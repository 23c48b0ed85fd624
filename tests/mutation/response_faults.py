"""Which faults are seeded where a chat is answered in the form of `/v1/responses`?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ITEMS, INPUT, OBJECT = (f"serving/api/responses{name}.py" for name in ("_items", "_input", ""))
_TESTS = ("tests/serving/test_response_items.py",)
RESPONSE_TESTS_OF = {ITEMS: _TESTS, INPUT: _TESTS, OBJECT: _TESTS, "serving/api/spoken.py": _TESTS}

RESPONSE_FAULTS = (
    Fault(
        "items_share_an_event",
        ITEMS,
        'yield from self._close("completed")\n        item =',
        "item =",
        "an item is never done when another follows, and OpenAI's client waits for it",
    ),
    Fault(
        "cut_answer_is_complete",
        OBJECT,
        'return "completed" if delta.finish_reason == "stop" else "incomplete"',
        'return "completed" if delta.finish_reason else "incomplete"',
        "a client takes half an answer for a whole one",
    ),
    Fault(
        "events_without_numbers_of_their_own",
        OBJECT,
        "self._num_events += 1",
        "self._num_events = 1",
        "a client cannot tell which event it has seen",
    ),
    Fault(
        "calls_forget_their_thoughts",
        INPUT,
        "        if self._turn is None:\n",
        "        if self._turn is None or True:\n",
        "thoughts, text and calls of one turn become messages of several",
    ),
    Fault(
        "all_tokens_are_thoughts",
        "serving/api/spoken.py",
        "elif reasoning.has_ended and not had_ended:",
        "elif reasoning.has_ended:",
        "what the answer takes is counted as thoughts",
    ),
)
