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

SCALING_FAULTS = {
    "asks_again_while_one_starts": Fault(
        SCALING + "::decide",
        "demand.num_ready >= wanted and demand.queued_tokens > bounds.queued_tokens * wanted",
        "demand.queued_tokens > bounds.queued_tokens * wanted",
        "what one that loads for minutes is for brings all that there may be",
    ),
    "queue_of_all_for_one": Fault(
        SCALING + "::decide",
        "bounds.queued_tokens * wanted",
        "bounds.queued_tokens",
        "a large fleet grows at what is little for each of its replicas",
    ),
    "goes_at_the_number_at_which_it_came": Fault(
        SCALING + "::decide",
        "demand.queued_tokens * 2 <= bounds.queued_tokens * others",
        "demand.queued_tokens <= bounds.queued_tokens * wanted",
        "replicas come and go at a load that stays the same",
    ),
    "idle_by_the_queue_alone": Fault(
        SCALING + "::decide",
        (
            "demand.queued_tokens * 2 <= bounds.queued_tokens * others and demand.requests <= ROOM *"
            " bounds.slots * others"
        ),
        "demand.queued_tokens * 2 <= bounds.queued_tokens * others",
        "nothing waits where all are just busy enough, so that one goes and comes again",
    ),
    "time_of_what_nobody_knows": Fault(
        SCALING + "::decide",
        "Scale(wanted)",
        "scale",
        "a router that was away for a minute counts as a minute of crowd",
    ),
    "more_than_the_most": Fault(
        SCALING + "::decide", "wanted < bounds.most", "wanted <= bounds.most", "one more than was allowed"
    ),
    "stopped_while_it_answers": Fault(
        REPLICA_SET + "::ReplicaSet._stop_drained",
        "each.replica.url is None or each.replica.url not in told.replicas",
        "True",
        "one that is scaled down ends with its requests unanswered",
    ),
    "the_busiest_goes": Fault(
        REPLICA_SET + "::ReplicaSet._adjust",
        "min(reversed(self._staying), key=requests)",
        "max(reversed(self._staying), key=requests)",
        "the one whose requests take longest to end, and never the one that only starts",
    ),
    "started_again_without_a_pause": Fault(
        REPLICA_SET + "::ReplicaSet.bury",
        "now_s + min(2.0**self._num_failed, MOST_PAUSE_S)",
        "now_s",
        "a model that cannot be loaded is loaded again at once, for ever",
    ),
    "forgets_who_has_its_address_now": Fault(
        REPLICA_SET + "::ReplicaSet._tell",
        "self._gone.discard(url)",
        "",
        "a replica at the port of one that has died is taken from the router again",
    ),
    "forgotten_with_requests_open": Fault(
        MEMBERSHIP + "::FleetMembers.watch",
        'each.leaves and each.state != "gone" and not each.num_open',
        'each.leaves and each.state != "gone"',
        "what a leaving replica is at is cut off",
    ),
    "no_name_server_no_replicas": Fault(
        MEMBERSHIP + "::FleetMembers.follow",
        "trouble = str(error)",
        "trouble = str(error)\nself._become(url, set())",
        "a name server that is away for a second empties the fleet",
    ),
}
