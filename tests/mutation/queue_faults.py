"""Which faults are seeded where it is decided who waits, in what order, and how much of a step is whose?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
ADAPTIVE, CHUNKS = ROOM + "policies/adaptive_prefill_budget.py", ROOM + "policies/prefill_budget.py"
BOUNDS, LANES = ROOM + "queueing/limits.py", ROOM + "policies/long_prompts.py"
ORDERS, OUTRANK, TENANTS = (
    ROOM + "queueing/ordering.py",
    ROOM + "scheduling/preemption.py",
    ROOM + "queueing/fair_share.py",
)
ORCA, PREFILL_FIRST = ROOM + "policies/orca.py", ROOM + "policies/prefill_first.py"
SPLIT, STALL_FREE, STEP_TIME = (
    ROOM + "policies/split.py",
    ROOM + "policies/stall_free.py",
    ROOM + "step_time.py",
)
QUEUES = (ADAPTIVE, BOUNDS, CHUNKS, LANES, ORDERS, TENANTS, ORCA, PREFILL_FIRST, SPLIT, STALL_FREE, STEP_TIME)

QUEUE_FAULTS = (
    Fault(
        "longs_keep_nothing",
        LANES,
        "        return -(-max(total, 0) // 2)\n",
        "        return 0\n",
        "a long prompt waits for as long as short ones come",
    ),
    Fault(
        "longs_without_number",
        LANES,
        "return left, self.max_long - int(np.count_nonzero(is_long))",
        "return left, self.max_long",
        "all long prompts are computed at once",
    ),
    Fault(
        "stage_beyond_the_last",
        CHUNKS,
        "stages = np.minimum(busy.computed // self._stage_tokens, len(self.sizes) - 1)",
        "stages = busy.computed // self._stage_tokens",
        "a prompt that is longer than its stages stops the engine",
    ),
    Fault(
        "split_without_its_budget",
        SPLIT,
        "min(left, self._prompt_tokens)",
        "left",
        "prompts take the tokens that are not theirs",
    ),
    Fault(
        "orca_counts_no_decodes",
        ORCA,
        "budget - int(np.count_nonzero(decodes))",
        "budget",
        "a step exceeds its budget by its decodes",
    ),
    Fault(
        "prompts_beside_decodes",
        PREFILL_FIRST,
        "whole_prompts(np.where(busy.decodes, 0, busy.todo), budget)",
        "whole_prompts(busy.todo, budget)",
        "a step of the policy that parts prompts from decodes holds both",
    ),
    Fault(
        "chunks_of_any_length",
        STALL_FREE,
        "        wanted = np.where(decodes, 0, np.minimum(busy.todo, limit.each))\n",
        "        wanted = np.where(decodes, 0, busy.todo)\n",
        "the longest chunk is not kept to",
    ),
    Fault(
        "priority_turned_round",
        ORDERS,
        "request.arrival_s - self.priority_s * request.priority",
        "request.arrival_s + self.priority_s * request.priority",
        "who is urgent goes last",
    ),
    Fault(
        "nobody_ages",
        ORDERS,
        "return request.arrival_s - self.priority_s",
        "return -self.priority_s",
        "who has waited for hours is overtaken for ever",
    ),
    Fault(
        "turns_saved_up",
        TENANTS,
        "            self._served[tenant] = max(self._served[tenant], self._floor)\n",
        "",
        "a tenant that was away has all turns when it comes back",
    ),
    Fault(
        "weights_unread",
        TENANTS,
        "self._served += np.bincount(self._row_tenant[rows], minlength=len(self._names)) / self._weight",
        "self._served += np.bincount(self._row_tenant[rows], minlength=len(self._names))",
        "a tenant of twice the weight gets no more than another",
    ),
    Fault(
        "tenant_of_the_row_before",
        TENANTS,
        "unknown = rows[self._row_number[rows] != slots.number[rows]]",
        "unknown = rows[self._row_number[rows] < 0]",
        "a tenant pays for what another is served",
    ),
    Fault(
        "outranked_without_end",
        OUTRANK,
        "return row if self._waiting.place(request) < self._waiting.place(slots.requests[row]) else None",
        "return row",
        "a request of low priority is preempted whenever one of higher priority comes",
    ),
    Fault(
        "queue_without_end",
        BOUNDS,
        "            if count > limit:\n",
        "            if count > 2 * limit:\n",
        "more wait than the bound says",
    ),
    Fault(
        "timeouts_only_waiting",
        BOUNDS,
        "if request.finish_reason is None and (waits or not only_waiting):",
        "if request.finish_reason is None and waits:",
        "a running request outlives its timeout",
    ),
    Fault(
        "target_unheeded",
        ADAPTIVE,
        "within = times_s <= self._target_itl_s",
        "within = times_s <= 2 * self._target_itl_s",
        "decodes wait twice as long as they may",
    ),
    Fault(
        "noise_unheeded",
        STEP_TIME,
        "            self.margin = float(np.quantile(self._ratios[: self._num_ratios], self._quantile))\n",
        "            self.margin = 1.0\n",
        "half of all steps miss the target",
    ),
)
