"""Which faults are seeded where keys become answers: attention on a CPU, and the choice among samples?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ATTENTION, SAMPLES = "attention/cpu/attention.py", "serving/answers/answers.py"

ANSWER_FAULTS = (
    Fault(
        "prompt_weighs_what_nobody_wrote",
        ATTENTION,
        "        values[:, prompt.known :] = 0\n",
        "",
        "a NaN beyond a prompt's end reaches it, for zero times NaN is NaN",
    ),
    Fault(
        "decode_weighs_what_nobody_wrote",
        ATTENTION,
        "            value = torch.where(exists[:, None, :, None], value, 0.0)\n",
        "",
        "a NaN in the last tile beyond a row's end reaches the row",
    ),
    Fault(
        "prompt_looks_past_its_window",
        ATTENTION,
        "seen = (key >= first[:, None]) & (key <= last[:, None])",
        "seen = key <= last[:, None]",
        "a sliding window slides for decodes only",
    ),
    Fault(
        "prompt_looks_ahead",
        ATTENTION,
        "seen = (key >= first[:, None]) & (key <= last[:, None])",
        "seen = key >= first[:, None]",
        "tokens of a prompt read those after them",
    ),
    Fault(
        "tiles_joined_unscaled",
        ATTENTION,
        "    scale = torch.exp(peaks - top)\n",
        "    scale = is_tile[:, :, None].float()\n",
        "each tile counts alike, whatever its scores",
    ),
    Fault(
        "least_likely_samples_answer",
        SAMPLES,
        "-whole.cumulative_logprob",
        "whole.cumulative_logprob",
        "best_of returns the worst",
    ),
    Fault(
        "failed_sample_is_the_best",
        SAMPLES,
        'return whole.finish_reason == "error", ',
        "return False, ",
        "a sample that failed at once has the highest log-probability of all",
    ),
    Fault(
        "best_of_those_who_were_first",
        SAMPLES,
        "if self.num_open:",
        "if self.num_open > len(self.samples) - self.num_answers:",
        "the shortest samples are taken for the best, and others answer twice",
    ),
    Fault(
        "equal_samples_in_another_order",
        SAMPLES,
        "sorted(held, key=_rank)",
        "sorted(reversed(held), key=_rank)",
        "which of two equal samples is the answer is not what their order says",
    ),
)
