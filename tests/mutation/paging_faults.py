"""Which faults are seeded where requests hold pages?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
LIFECYCLE, MATCHING = ROOM + "paging/slot_lifecycle.py", ROOM + "paging/prefix_matching.py"
TABLES, SWAP = ROOM + "paging/page_tables.py", ROOM + "paging/swap.py"

PAGING_FAULTS = {
    "full_hit_computes_nothing": Fault(
        ROOM + "request.py::Request.num_findable",
        "len(self.tokens) - 1",
        "len(self.tokens)",
        "a prompt that is cached whole leaves no token to sample from",
    ),
    "published_before_computed": Fault(
        MATCHING + "::PrefixMatching.publish_prompts",
        "np.minimum(slots.num_computed[rows] // slots.page_size, slots.num_shareable[rows])",
        "slots.num_shareable[rows]",
        "others read pages that the next chunk will write",
    ),
    "half_page_published": Fault(
        MATCHING + "::PrefixMatching.publish_all",
        "num_whole // slots.page_size",
        "-(-num_whole // slots.page_size)",
        "an aborted request leaves a page that is found and half written",
    ),
    "failed_pages_stay": Fault(
        MATCHING + "::PrefixMatching.forget",
        "self._prefix.forget(self._slots.pages(row)[: self._slots.num_published[row]])",
        "[]",
        "one request's NaN poisons all that share its prompt",
    ),
    "only_its_own_failed_pages_forgotten": Fault(
        MATCHING + "::PrefixMatching.forget",
        "self._slots.pages(row)[: self._slots.num_published[row]]",
        "self._slots.pages(row)[self._slots.num_shareable[row] :]",
        "what it found, and may have failed by, is found again and fails the next",
    ),
    "failed_token_kept": Fault(
        LIFECYCLE + "::SlotLifecycle.settle", "slots.num_tokens[row] -= 1", "", "an answer ends with token -1"
    ),
    "swap_drops_the_last_page": Fault(
        LIFECYCLE + "::SlotLifecycle.swap_out",
        "-(-num_computed // slots.page_size)",
        "num_computed // slots.page_size",
        "the partly filled page of a victim is not swapped out",
    ),
    "swapped_in_after_any_beginning": Fault(
        LIFECYCLE + "::SlotLifecycle._swap_in",
        "slots.num_pages[row] == swapped.first",
        "slots.num_pages[row] <= swapped.first",
        "pages come back although the shared ones before them were evicted",
    ),
    "swapped_in_one_token_ahead": Fault(
        LIFECYCLE + "::SlotLifecycle._swap_in",
        "swapped.num_computed",
        "swapped.num_computed - 1",
        "a resumed request computes a token twice",
    ),
    "host_pages_kept_after_return": Fault(
        LIFECYCLE + "::SlotLifecycle._swap_in",
        (
            "if slots.num_pages[row] == swapped.first: ...\n"
            "else:\n"
            "    self._counters.broken_swaps += 1\n"
            "self.swap.forget(request)"
        ),
        (
            "if slots.num_pages[row] == swapped.first: ...\n"
            "else:\n"
            "    self._counters.broken_swaps += 1\n"
            "    self.swap.forget(request)"
        ),
        "the host pool fills up with what came back long ago",
    ),
    "found_beyond_what_was_swapped": Fault(
        LIFECYCLE + "::SlotLifecycle.find",
        "pages if swapped is None else pages[: swapped.first]",
        "pages",
        "a request finds pages that it also left in the host pool",
    ),
    "nobody_waits_for_a_page": Fault(
        MATCHING + "::PrefixMatching._is_in_progress",
        "index >= len(keys)",
        "True",
        "prompts that arrive together are all computed",
    ),
    "released_rows_still_wait": Fault(
        MATCHING + "::PrefixMatching.leave",
        "self._blocked.pop(row, None)",
        "",
        "a row's next request waits for a page that it does not need",
    ),
    "private_doubles_kept": Fault(
        MATCHING + "::PrefixMatching._publish",
        "len(doubles)",
        "False",
        "a chain's pages have different holders, and parents go before leaves",
    ),
    "doubles_not_shared": Fault(
        MATCHING + "::PrefixMatching._publish",
        "self._prefix.share(standing[doubles])",
        "",
        "a row lets go of a page that it never held",
    ),
    "promises_not_counted": Fault(
        LIFECYCLE + "::SlotLifecycle.num_promised",
        "int(np.maximum(wanted - slots.num_pages[busy], 0).sum())",
        "0 * int(np.maximum(wanted - slots.num_pages[busy], 0).sum())",
        "admitted, preempted, admitted again: nothing gets on",
    ),
    "fork_marks_one_side": Fault(
        TABLES + "::PageTables.fork",
        "{source, row}",
        "{row}",
        "the leader writes on into the page that its forks read",
    ),
    "copy_on_write_without_data": Fault(
        TABLES + "::PageTables._copy_on_write",
        "self.copy(PageCopy(np.array(sources), np.array(targets)))",
        "",
        "a fork gets a page of its own, and somebody else's old keys in it",
    ),
    "no_copy_on_write": Fault(
        TABLES + "::PageTables._copy_on_write",
        "self.pool.holders[page] > 1",
        "False",
        "samples of one prompt overwrite each other",
    ),
    "copy_on_write_from_three": Fault(
        TABLES + "::PageTables._copy_on_write",
        "self.pool.holders[page] > 1",
        "self.pool.holders[page] > 2",
        "the last two sharers write into one page",
    ),
    "copies_need_no_pages": Fault(
        TABLES + "::PageTables.num_copies",
        "sum(min(count, int(holders[page]) - 1) for page, count in Counter(pages).items())",
        "0",
        "a copy on write finds no page when the pool is full",
    ),
    "compaction_moves_no_data": Fault(
        TABLES + "::PageTables.compact",
        "self.copy(PageCopy(sources, targets))",
        "",
        "pages are renamed, and their content stays behind",
    ),
    "compaction_forgets_the_index": Fault(
        TABLES + "::PageTables.compact",
        "self.prefix.move(sources, targets)",
        "",
        "the prefix cache finds the page that was moved away",
    ),
    "compaction_forgets_the_rows": Fault(
        TABLES + "::PageTables.compact",
        "self.slots.rename_pages(sources, targets, self.pool.num_pages)",
        "",
        "the page table still names the old pages",
    ),
    "replaced_pages_kept": Fault(
        TABLES + "::PageTables.replace", "self.prefix.release(old)", "", "every copy on write leaks a holder"
    ),
    "pages_leak_at_the_end": Fault(
        TABLES + "::PageTables.clear",
        "self.prefix.release(self.slots.pages(row))",
        "",
        "aborted requests keep their pages",
    ),
    "count_stays_after_the_end": Fault(
        TABLES + "::PageTables.clear",
        "self.slots.num_pages[row] = 0",
        "",
        "a row that is free seems to hold pages",
    ),
    "fork_mark_stays_after_the_end": Fault(
        TABLES + "::PageTables.clear",
        "self.forked.discard(row)",
        "",
        "pages are promised to a copy that nobody makes",
    ),
    "evicted_one_short": Fault(
        TABLES + "::PageTables.grow",
        "total + self.num_copies(rows) - self.pool.num_free",
        "total + self.num_copies(rows) - self.pool.num_free - 1",
        "a page is taken that is not free",
    ),
    "host_pages_leak": Fault(
        SWAP + "::SwapTier.forget",
        "self.pool.release(swapped.pages)",
        "pass",
        "what an aborted request left in the host pool stays for ever",
    ),
    "host_pool_overdrawn": Fault(
        SWAP + "::SwapTier.leave",
        "not self._prefix.yield_host(num_pages)",
        "False",
        "samples of one prompt exhaust the host pool, and the engine stops",
    ),
}
