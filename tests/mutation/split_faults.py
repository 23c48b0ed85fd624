"""Which faults are seeded where it is decided who computes a prompt, and where that is simulated?"""

from __future__ import annotations

from tests.mutation.exchange_faults import SPLITTING
from tests.mutation.fault import Fault

FLEET, SPLIT_FLEET = "simulation/fleet.py", "simulation/disaggregated.py"
SPLIT_TESTS_OF = {
    FLEET: ("tests/simulation/test_fleet.py", "tests/simulation/test_disaggregated.py"),
    SPLIT_FLEET: ("tests/simulation/test_disaggregated.py",),
}

SPLIT_FAULTS = (
    Fault(
        "answers_not_slowed",
        SPLITTING,
        "(1 + self._weights.answer * others)",
        "(1 + self._weights.answer)",
        "long prompts are computed beside however many answers",
    ),
    Fault(
        "less_than_a_page_apart",
        SPLITTING,
        " or to_compute <= prompt.tokens_a_key:\n",
        " or to_compute <= 0:\n",
        "another engine is asked for pages of which there are none",
    ),
    Fault(
        "closed_prompts_chosen",
        SPLITTING,
        " if each in sources and is_open[at]]",
        " if each in sources]",
        "a prompt is to be computed by a replica that is lost",
    ),
    Fault(
        "hits_of_prompts_unseen",
        SPLITTING,
        "        return waits + prompt.num_tokens - hits + weights.transfer",
        "        return waits + prompt.num_tokens + weights.transfer",
        "a prompt is computed anew beside the replica that has it",
    ),
    Fault(
        "pages_move_for_nothing",
        SPLITTING,
        " + weights.page_token * num_moved\n",
        "\n",
        "a long prompt leaves for a gain that its pages' way takes back",
    ),
    Fault(
        "nobody_left_to_answer",
        SPLITTING,
        "        if not others:\n            return []\n",
        "        if not others:\n            return ours\n",
        "requests are refused while a replica of prompts could answer them",
    ),
    Fault(
        "prompt_waits_at_both",
        SPLITTING,
        "        self._routing.begun(sent)  # nothing of it waits to be computed here\n",
        "",
        "a replica of answers seems busy with prompts that others compute",
    ),
    Fault(
        "nobody_s_source",
        SPLITTING,
        " if each in sources and is_open[at]]",
        " if is_open[at]]",
        "a prompt goes to a replica whose pages cannot come back",
    ),
    Fault(
        "prompts_answered_there",
        SPLITTING,
        "            return ours\n        return [each",
        "            return []\n        return [each",
        "replicas of prompts are as busy with answers as others",
    ),
    Fault(
        "begun_unseen_in_simulation",
        FLEET,
        "                self.routing.begun(each.sent)\n",
        "",
        "the simulated router believes that prompts wait which have been computed",
    ),
    Fault(
        "ended_unseen_in_simulation",
        FLEET,
        "                self.routing.ended(each.sent)\n            else:",
        "                pass\n            else:",
        "supposed pages and own counts stay for ever in the simulated router",
    ),
    Fault(
        "begun_before_it_has",
        FLEET,
        "(request.first_token_s is not None and request.first_token_s <= now_s)",
        "request.first_token_s is not None",
        "the simulated router sees what is still to come",
    ),
    Fault(
        "prompt_never_ends_in_simulation",
        FLEET,
        "                    self.routing.ended(each.prompt)\n",
        "                    pass\n",
        "replicas of prompts seem fuller with each request, until nothing is split",
    ),
    Fault(
        "link_sends_all_at_once",
        SPLIT_FLEET,
        "            sent_s = max(begun_s + layer_s, self._free_s[moving.prompts]) + took_s\n",
        "            sent_s = begun_s + layer_s + took_s\n",
        "a link carries more than it can",
    ),
    Fault(
        "simulated_pages_lost",
        SPLIT_FLEET,
        "is_whole=moving.is_whole)\n            replica.add(",
        "is_whole=False)\n            replica.add(",
        "each prompt is computed twice, and splitting seems to gain nothing",
    ),
    Fault(
        "told_of_what_is_to_come",
        FLEET,
        "if (each.request.first_token_s or 0.0) > now_s]",
        "if False]",
        "a prompt counts as computed twice, and its engine seems to wait for less than it does",
    ),
    Fault(
        "told_as_ended_before",
        FLEET,
        "        requests = replica.num_requests + ending + num_before\n",
        "        requests = replica.num_requests + num_before\n",
        "a request that is about to end is taken from its engine's figures twice",
    ),
)
