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

QUEUE_FAULTS = {
    "longs_keep_nothing": Fault(
        LANES + "::LongPrompts._half",
        "-(-max(total, 0) // 2)",
        "0",
        "a long prompt waits for as long as short ones come",
    ),
    "longs_without_number": Fault(
        LANES + "::LongPrompts.left",
        "self.max_long - int(np.count_nonzero(is_long))",
        "self.max_long",
        "all long prompts are computed at once",
    ),
    "stage_beyond_the_last": Fault(
        CHUNKS + "::StagedChunks.limit",
        "np.minimum(busy.computed // self._stage_tokens, len(self.sizes) - 1)",
        "busy.computed // self._stage_tokens",
        "a prompt that is longer than its stages stops the engine",
    ),
    "split_without_its_budget": Fault(
        SPLIT + "::Split._limit",
        "min(left, self._prompt_tokens)",
        "left",
        "prompts take the tokens that are not theirs",
    ),
    "orca_counts_no_decodes": Fault(
        ORCA + "::Orca.share",
        "budget - int(np.count_nonzero(decodes))",
        "budget",
        "a step exceeds its budget by its decodes",
    ),
    "prompts_beside_decodes": Fault(
        PREFILL_FIRST + "::PrefillFirst.share",
        "np.where(busy.decodes, 0, busy.todo)",
        "busy.todo",
        "a step of the policy that parts prompts from decodes holds both",
    ),
    "chunks_of_any_length": Fault(
        STALL_FREE + "::StallFree.share",
        "np.minimum(busy.todo, limit.each)",
        "busy.todo",
        "the longest chunk is not kept to",
    ),
    "priority_turned_round": Fault(
        ORDERS + "::Aged.__call__",
        "request.arrival_s - self.priority_s * request.priority",
        "request.arrival_s + self.priority_s * request.priority",
        "who is urgent goes last",
    ),
    "nobody_ages": Fault(
        ORDERS + "::Aged.__call__",
        "request.arrival_s - self.priority_s * request.priority",
        "-self.priority_s * request.priority",
        "who has waited for hours is overtaken for ever",
    ),
    "turns_saved_up": Fault(
        TENANTS + "::FairShare.join",
        "self._served[tenant] = max(self._served[tenant], self._floor)",
        "",
        "a tenant that was away has all turns when it comes back",
    ),
    "weights_unread": Fault(
        TENANTS + "::FairShare.charge_answers",
        "np.bincount(self._row_tenant[rows], minlength=len(self._names)) / self._weight",
        "np.bincount(self._row_tenant[rows], minlength=len(self._names))",
        "a tenant of twice the weight gets no more than another",
    ),
    "tenant_of_the_row_before": Fault(
        TENANTS + "::FairShare.charge_answers",
        "self._row_number[rows] != slots.number[rows]",
        "self._row_number[rows] < 0",
        "a tenant pays for what another is served",
    ),
    "outranked_without_end": Fault(
        OUTRANK + "::Preemption.outranked",
        "row if self._waiting.place(request) < self._waiting.place(slots.requests[row]) else None",
        "row",
        "a request of low priority is preempted whenever one of higher priority comes",
    ),
    "queue_without_end": Fault(
        BOUNDS + "::QueueGate.check", "count > limit", "count > 2 * limit", "more wait than the bound says"
    ),
    "timeouts_only_waiting": Fault(
        BOUNDS + "::QueueGate.over",
        "waits or not only_waiting",
        "waits",
        "a running request outlives its timeout",
    ),
    "target_unheeded": Fault(
        ADAPTIVE + "::AdaptiveChunks.limit",
        "self._target_itl_s",
        "2 * self._target_itl_s",
        "decodes wait twice as long as they may",
    ),
    "noise_unheeded": Fault(
        STEP_TIME + "::StepTime._remember",
        "float(np.quantile(self._ratios[: self._num_ratios], self._quantile))",
        "1.0",
        "half of all steps miss the target",
    ),
}
