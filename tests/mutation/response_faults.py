"""Which faults are seeded in the form of `/v1/responses`, and where texts are scored?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ITEMS, INPUT, OBJECT = (f"serving/api/responses{name}.py" for name in ("_items", "_input", ""))
_TESTS = ("tests/serving/test_response_items.py",)
EFFORT, SPOKEN = "serving/text/effort.py", "serving/api/spoken.py"
SCORES, QUESTIONS = "serving/api/scores.py", "serving/text/questions.py"
RESPONSE_TESTS_OF = {
    **dict.fromkeys((ITEMS, INPUT, OBJECT, SPOKEN), _TESTS),
    EFFORT: ("tests/serving/test_effort.py",),
    **dict.fromkeys((SCORES, QUESTIONS), ("tests/serving/test_scores.py",)),
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
    Fault(
        "worst_document_first",
        SCORES,
        "key=lambda at: -scores[at]",
        "key=lambda at: scores[at]",
        "a search shows what matches least",
    ),
    Fault(
        "score_of_the_other_answer",
        SCORES,
        "np.exp(logprobs[:, 1] - logprobs[:, 0])",
        "np.exp(logprobs[:, 0] - logprobs[:, 1])",
        "what the model says no to scores high",
    ),
    Fault(
        "documents_may_hold_marks",
        QUESTIONS,
        "content = _MARK.sub(lambda mark: texts[mark[1]], self.question)",
        'content = self.question.replace("{document}", document).replace("{query}", query)',
        "a document that writes {query} gets the query's words",
    ),
)
