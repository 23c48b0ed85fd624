"""Which faults are seeded where the host works ahead of the device?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
FLIGHT, SCHEDULER, LIFECYCLE = (
    ROOM + "scheduling/in_flight.py",
    ROOM + "scheduling/scheduler.py",
    ROOM + "paging/slot_lifecycle.py",
)

FLIGHT_FAULTS = (
    Fault(
        "ended_under_the_batch",
        SCHEDULER,
        "if len(self.in_flight) else False",
        "if False else False",
        "a row is freed while the device computes it, and booked after",
    ),
    Fault(
        "forks_not_in_flight",
        SCHEDULER,
        "involved = np.union1d(rows, owners)",
        "involved = rows",
        "a fork that is aborted before its first commit is freed at once",
    ),
    Fault(
        "late_token_kept",
        SCHEDULER,
        "kept = np.flatnonzero(~np.isin(rows, list(outrun)))",
        "kept = np.arange(len(rows))",
        "a client gets a token after it hung up",
    ),
    Fault(
        "ended_while_it_failed",
        SCHEDULER,
        "failed=has_failed or row in failed",
        "failed=has_failed",
        "an abort hides that the pages are wrong",
    ),
    Fault(
        "failed_and_outrun_published",
        SCHEDULER,
        "wrong = [*failed.tolist(), *(row for row, has_failed in outrun.items() if has_failed)]",
        "wrong = failed.tolist()",
        "what a failed row went on to compute is found by others",
    ),
    Fault(
        "unknown_token_read_by_the_host",
        SCHEDULER,
        "copies, unknown = self.tables.take_copies(), self.in_flight.is_unknown(rows)",
        "copies, unknown = self.tables.take_copies(), EMPTY",
        "the device computes token 0 in place of the one that it chose",
    ),
    Fault(
        "ahead_without_pages",
        SCHEDULER,
        "return missing + len(tables.forked) <= tables.num_available",
        "return True",
        "a row is preempted whose last token nobody knows",
    ),
    Fault(
        "ahead_of_what_edits_read",
        FLIGHT,
        "        return bool(self._slots.plain[self.last.owners].all())\n",
        "        return True\n",
        "a penalty counts a token that is not there yet",
    ),
    Fault(
        "unknown_token_stays_booked",
        FLIGHT,
        "        self._slots.num_tokens[self._unknown] -= 1\n",
        "",
        "every token of an overlapped step is booked twice",
    ),
    Fault(
        "unknown_token_answered",
        FLIGHT,
        "            self._slots.num_tokens[row] -= 1\n",
        "",
        "an aborted answer ends in a token that nobody chose",
    ),
    Fault(
        "full_rows_go_on",
        FLIGHT,
        "full: Index = rows[slots.num_tokens[rows] >= slots.limit[rows]]",
        "full: Index = rows[:0]",
        "a request is computed beyond its limit",
    ),
    Fault(
        "outrun_rows_go_on",
        FLIGHT,
        "np.array(list(self.outrun), dtype=np.int64)])",
        "rows[:0]])",
        "a request that ended is computed for ever",
    ),
    Fault(
        "freed_before_it_landed",
        FLIGHT,
        "if not self.holds(row)}",
        "if True}",
        "a row is given away that the device still writes",
    ),
)
