"""Which faults are seeded where it is decided who computes a prompt, and where that is simulated?"""

from __future__ import annotations

from tests.mutation.exchange_faults import SPLITTING
from tests.mutation.fault import Fault

FLEET, SPLIT_FLEET = "simulation/fleet.py", "simulation/disaggregated.py"
SPLIT_TESTS_OF = {
    FLEET: ("tests/simulation/test_fleet.py", "tests/simulation/test_disaggregated.py"),
    SPLIT_FLEET: ("tests/simulation/test_disaggregated.py",),
}

SPLIT_FAULTS = {
    "answers_not_slowed": Fault(
        SPLITTING + "::Splitting._cost_here",
        "self._weights.answer * others",
        "self._weights.answer",
        "long prompts are computed beside however many answers",
    ),
    "less_than_a_page_apart": Fault(
        SPLITTING + "::Splitting.choose",
        "prompt.tokens_a_key",
        "0",
        "another engine is asked for pages of which there are none",
    ),
    "closed_prompts_chosen": Fault(
        SPLITTING + "::Splitting._places",
        "each in sources and is_open[at]",
        "each in sources",
        "a prompt is to be computed by a replica that is lost",
    ),
    "hits_of_prompts_unseen": Fault(
        SPLITTING + "::Splitting._cost_at",
        "waits + prompt.num_tokens - hits",
        "waits + prompt.num_tokens",
        "a prompt is computed anew beside the replica that has it",
    ),
    "pages_move_for_nothing": Fault(
        SPLITTING + "::Splitting._cost_at",
        "waits + prompt.num_tokens - hits + weights.transfer + weights.page_token * num_moved",
        "waits + prompt.num_tokens - hits + weights.transfer",
        "a long prompt leaves for a gain that its pages' way takes back",
    ),
    "nobody_left_to_answer": Fault(
        SPLITTING + "::Splitting.not_for_answers",
        "if not others:\n    return []",
        "if not others:\n    return ours",
        "requests are refused while a replica of prompts could answer them",
    ),
    "prompt_waits_at_both": Fault(
        SPLITTING + "::Splitting.choose",
        "self._routing.begun(sent)",
        "",
        "a replica of answers seems busy with prompts that others compute",
    ),
    "nobody_s_source": Fault(
        SPLITTING + "::Splitting._places",
        "each in sources and is_open[at]",
        "is_open[at]",
        "a prompt goes to a replica whose pages cannot come back",
    ),
    "prompts_answered_there": Fault(
        SPLITTING + "::Splitting.not_for_answers",
        "return ours",
        "return []",
        "replicas of prompts are as busy with answers as others",
    ),
    "begun_unseen_in_simulation": Fault(
        FLEET + "::Fleet._see",
        "self.routing.begun(each.sent)",
        "",
        "the simulated router believes that prompts wait which have been computed",
    ),
    "ended_unseen_in_simulation": Fault(
        FLEET + "::Fleet._see",
        "self.routing.ended(each.sent)",
        "pass",
        "supposed pages and own counts stay for ever in the simulated router",
    ),
    "begun_before_it_has": Fault(
        FLEET + "::Fleet._see",
        "request.first_token_s is not None and request.first_token_s <= now_s",
        "request.first_token_s is not None",
        "the simulated router sees what is still to come",
    ),
    "prompt_never_ends_in_simulation": Fault(
        FLEET + "::Fleet._see",
        "self.routing.ended(each.prompt)",
        "pass",
        "replicas of prompts seem fuller with each request, until nothing is split",
    ),
    "link_sends_all_at_once": Fault(
        SPLIT_FLEET + "::DisaggregatedFleet._computed",
        "max(begun_s + layer_s, self._free_s[moving.prompts])",
        "begun_s + layer_s",
        "a link carries more than it can",
    ),
    "simulated_pages_lost": Fault(
        SPLIT_FLEET + "::DisaggregatedFleet.advance",
        "moving.is_whole",
        "False",
        "each prompt is computed twice, and splitting seems to gain nothing",
    ),
    "told_of_what_is_to_come": Fault(
        FLEET + "::Fleet._tell",
        "(each.request.first_token_s or 0.0) > now_s",
        "False",
        "a prompt counts as computed twice, and its engine seems to wait for less than it does",
    ),
    "told_as_ended_before": Fault(
        FLEET + "::Fleet._tell",
        "replica.num_requests + ending",
        "replica.num_requests",
        "a request that is about to end is taken from its engine's figures twice",
    ),
}
