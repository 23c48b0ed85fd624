"""Which faults are seeded where it is decided how many replicas there are, and who comes and goes?"""

from __future__ import annotations

from tests.mutation.fault import Fault

SCALING = "continuous_batching/scaling.py"
REPLICA_SET = "recipes/build/replica_set.py"
MEMBERSHIP = "serving/router/membership.py"
SCALING_TESTS_OF = {
    SCALING: ("tests/continuous_batching/test_scaling.py",),
    REPLICA_SET: ("tests/recipes/test_replica_set.py",),
    MEMBERSHIP: ("tests/serving/router/test_membership.py",),
}

SCALING_FAULTS = (
    Fault(
        "asks_again_while_one_starts",
        SCALING,
        "demand.num_ready >= wanted and demand.queued_tokens",
        "demand.queued_tokens",
        "what one that loads for minutes is for brings all that there may be",
    ),
    Fault(
        "queue_of_all_for_one",
        SCALING,
        "demand.queued_tokens > bounds.queued_tokens * wanted",
        "demand.queued_tokens > bounds.queued_tokens",
        "a large fleet grows at what is little for each of its replicas",
    ),
    Fault(
        "goes_at_the_number_at_which_it_came",
        SCALING,
        "demand.queued_tokens * 2 <= bounds.queued_tokens * others",
        "demand.queued_tokens <= bounds.queued_tokens * wanted",
        "replicas come and go at a load that stays the same",
    ),
    Fault(
        "idle_by_the_queue_alone",
        SCALING,
        "        and demand.requests <= ROOM * bounds.slots * others\n",
        "",
        "nothing waits where all are just busy enough, so that one goes and comes again",
    ),
    Fault(
        "time_of_what_nobody_knows",
        SCALING,
        "        return Scale(wanted)\n    is_crowded",
        "        return scale\n    is_crowded",
        "a router that was away for a minute counts as a minute of crowd",
    ),
    Fault(
        "more_than_the_most",
        SCALING,
        ">= bounds.more_after_s and wanted < bounds.most:",
        ">= bounds.more_after_s and wanted <= bounds.most:",
        "one more than was allowed",
    ),
    Fault(
        "stopped_while_it_answers",
        REPLICA_SET,
        "            is_forgotten = each.replica.url is None or each.replica.url not in told.replicas\n",
        "            is_forgotten = True\n",
        "one that is scaled down ends with its requests unanswered",
    ),
    Fault(
        "the_busiest_goes",
        REPLICA_SET,
        "least = min(reversed(self._staying), key=requests)",
        "least = max(reversed(self._staying), key=requests)",
        "the one whose requests take longest to end, and never the one that only starts",
    ),
    Fault(
        "started_again_without_a_pause",
        REPLICA_SET,
        "self._not_before_s = now_s + min(2.0**self._num_failed, MOST_PAUSE_S)",
        "self._not_before_s = now_s",
        "a model that cannot be loaded is loaded again at once, for ever",
    ),
    Fault(
        "forgets_who_has_its_address_now",
        REPLICA_SET,
        "            self._gone.discard(url)  # one that has ended had this address before\n",
        "",
        "a replica at the port of one that has died is taken from the router again",
    ),
    Fault(
        "forgotten_with_requests_open",
        MEMBERSHIP,
        'each.leaves and each.state != "gone" and not each.num_open:',
        'each.leaves and each.state != "gone":',
        "what a leaving replica is at is cut off",
    ),
    Fault(
        "no_name_server_no_replicas",
        MEMBERSHIP,
        "                trouble = str(error)\n",
        "                trouble = str(error)\n                self._become(url, set())\n",
        "a name server that is away for a second empties the fleet",
    ),
)
