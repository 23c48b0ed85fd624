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

RESPONSE_FAULTS = {
    "items_share_an_event": Fault(
        ITEMS + "::OutputItems._begin",
        'yield from self._close("completed")',
        "",
        "an item is never done when another follows, and OpenAI's client waits for it",
    ),
    "cut_answer_is_complete": Fault(
        OBJECT + "::_status",
        'delta.finish_reason == "stop"',
        "delta.finish_reason",
        "a client takes half an answer for a whole one",
    ),
    "events_without_numbers_of_their_own": Fault(
        OBJECT + "::ResponseObject._event",
        "self._num_events += 1",
        "self._num_events = 1",
        "a client cannot tell which event it has seen",
    ),
    "calls_forget_their_thoughts": Fault(
        INPUT + "::_Turns._spoken",
        "self._turn is None",
        "self._turn is None or True",
        "thoughts, text and calls of one turn become messages of several",
    ),
    "all_tokens_are_thoughts": Fault(
        SPOKEN + "::Spoken._after_thoughts",
        "reasoning.has_ended and not had_ended",
        "reasoning.has_ended",
        "what the answer takes is counted as thoughts",
    ),
    "effort_nobody_is_told": Fault(
        EFFORT + "::variables_for",
        'effort != "none" or thinks',
        'effort != "none" and thinks',
        "a model that always thinks is asked not to, and nobody says that it will",
    ),
    "worst_document_first": Fault(
        SCORES + "::Scores.whole", "-scores[at]", "scores[at]", "a search shows what matches least"
    ),
    "score_of_the_other_answer": Fault(
        SCORES + "::AskedJudge.scores",
        "logprobs[:, 1] - logprobs[:, 0]",
        "logprobs[:, 0] - logprobs[:, 1]",
        "what the model says no to scores high",
    ),
    "documents_may_hold_marks": Fault(
        QUESTIONS + "::Question.fields",
        "_MARK.sub(lambda mark: texts[mark[1]], self.question)",
        'self.question.replace("{document}", document).replace("{query}", query)',
        "a document that writes {query} gets the query's words",
    ),
}
