"""Which faults are seeded where the host works ahead of the device?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
FLIGHT, SCHEDULER, LIFECYCLE = (
    ROOM + "scheduling/in_flight.py",
    ROOM + "scheduling/scheduler.py",
    ROOM + "paging/slot_lifecycle.py",
)

FLIGHT_FAULTS = {
    "ended_under_the_batch": Fault(
        SCHEDULER + "::Scheduler._finish",
        "len(self.in_flight)",
        "False",
        "a row is freed while the device computes it, and booked after",
    ),
    "forks_not_in_flight": Fault(
        SCHEDULER + "::Scheduler.schedule",
        "np.union1d(rows, owners)",
        "rows",
        "a fork that is aborted before its first commit is freed at once",
    ),
    "late_token_kept": Fault(
        SCHEDULER + "::Scheduler.commit",
        "np.flatnonzero(~np.isin(rows, list(outrun)))",
        "np.arange(len(rows))",
        "a client gets a token after it hung up",
    ),
    "ended_while_it_failed": Fault(
        SCHEDULER + "::Scheduler.commit",
        "has_failed or row in failed",
        "has_failed",
        "an abort hides that the pages are wrong",
    ),
    "failed_and_outrun_published": Fault(
        SCHEDULER + "::Scheduler.commit",
        "[*failed.tolist(), *(row for row, has_failed in outrun.items() if has_failed)]",
        "failed.tolist()",
        "what a failed row went on to compute is found by others",
    ),
    "unknown_token_read_by_the_host": Fault(
        SCHEDULER + "::Scheduler.schedule",
        "self.in_flight.is_unknown(rows)",
        "EMPTY",
        "the device computes token 0 in place of the one that it chose",
    ),
    "ahead_without_pages": Fault(
        SCHEDULER + "::Scheduler.can_look_ahead",
        "missing + len(tables.forked) <= tables.num_available",
        "True",
        "a row is preempted whose last token nobody knows",
    ),
    "ahead_of_what_edits_read": Fault(
        FLIGHT + "::InFlight.takes_another",
        "bool(self._slots.plain[self.last.owners].all())",
        "True",
        "a penalty counts a token that is not there yet",
    ),
    "unknown_token_stays_booked": Fault(
        FLIGHT + "::InFlight.land",
        "self._slots.num_tokens[self._unknown] -= 1",
        "",
        "every token of an overlapped step is booked twice",
    ),
    "unknown_token_answered": Fault(
        FLIGHT + "::InFlight.outrun_by",
        "self._slots.num_tokens[row] -= 1",
        "",
        "an aborted answer ends in a token that nobody chose",
    ),
    "full_rows_go_on": Fault(
        FLIGHT + "::InFlight.withheld",
        "rows[slots.num_tokens[rows] >= slots.limit[rows]]",
        "rows[:0]",
        "a request is computed beyond its limit",
    ),
    "outrun_rows_go_on": Fault(
        FLIGHT + "::InFlight.withheld",
        "np.array(list(self.outrun), dtype=np.int64)",
        "rows[:0]",
        "a request that ended is computed for ever",
    ),
    "freed_before_it_landed": Fault(
        FLIGHT + "::InFlight.take_landed",
        "not self.holds(row)",
        "True",
        "a row is given away that the device still writes",
    ),
}
