"""Which faults are seeded where a chat is answered in the form of `/v1/responses`?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ITEMS, INPUT, OBJECT = (f"serving/api/responses{name}.py" for name in ("_items", "_input", ""))
_TESTS = ("tests/serving/test_response_items.py",)
EFFORT, SPOKEN = "serving/text/effort.py", "serving/api/spoken.py"
RESPONSE_TESTS_OF = {
    **dict.fromkeys((ITEMS, INPUT, OBJECT, SPOKEN), _TESTS),
    EFFORT: ("tests/serving/test_effort.py",),
}

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
        SPOKEN,
        "elif reasoning.has_ended and not had_ended:",
        "elif reasoning.has_ended:",
        "what the answer takes is counted as thoughts",
    ),
    Fault(
        "effort_nobody_is_told",
        EFFORT,
        'elif effort != "none" or thinks:',
        'elif effort != "none" and thinks:',
        "a model that always thinks is asked not to, and nobody says that it will",
    ),
)
