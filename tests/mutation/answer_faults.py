"""Which faults are seeded where keys become answers: attention on a CPU, and the choice among samples?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ATTENTION, SAMPLES = "attention/cpu/attention.py", "serving/answers/samples.py"

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
        "    scale = torch.exp(peaks - peaks.amax(1, keepdim=True))\n",
        "    scale = is_tile[:, :, None].float()\n",
        "each tile counts alike, whatever its scores",
    ),
    Fault(
        "least_likely_samples_answer",
        SAMPLES,
        "-sum(each.logprob for each in request.logprobs)",
        "sum(each.logprob for each in request.logprobs)",
        "best_of returns the worst",
    ),
    Fault(
        "failed_sample_is_the_best",
        SAMPLES,
        'return request.finish_reason == "error", -sum',
        "return False, -sum",
        "a sample that failed at once has the highest log-probability of all",
    ),
    Fault(
        "best_of_those_who_were_first",
        SAMPLES,
        "if len(self._ended) < len(self.requests):",
        "if len(self._ended) < self.num_answers:",
        "the shortest samples are taken for the best, and others answer twice",
    ),
    Fault(
        "equal_samples_by_their_end",
        SAMPLES,
        " for each in request.logprobs), request.number",
        " for each in request.logprobs), 0",
        "which of two equal samples is the answer depends on what else ran",
    ),
)
