"""Which faults are seeded where keys become answers: attention on a CPU, and the choice among samples?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ATTENTION, SAMPLES = "attention/cpu/attention.py", "serving/answers/answers.py"

ANSWER_FAULTS = {
    "prompt_weighs_what_nobody_wrote": Fault(
        ATTENTION + "::CpuAttention._matrices",
        "values[:, prompt.known :] = 0",
        "",
        "a NaN beyond a prompt's end reaches it, for zero times NaN is NaN",
    ),
    "decode_weighs_what_nobody_wrote": Fault(
        ATTENTION + "::CpuAttention._decode",
        "value = torch.where(exists[:, None, :, None], value, 0.0)",
        "",
        "a NaN in the last tile beyond a row's end reaches the row",
    ),
    "prompt_looks_past_its_window": Fault(
        ATTENTION + "::CpuAttention._weigh",
        "(key >= first[:, None]) & (key <= last[:, None])",
        "key <= last[:, None]",
        "a sliding window slides for decodes only",
    ),
    "prompt_looks_ahead": Fault(
        ATTENTION + "::CpuAttention._weigh",
        "(key >= first[:, None]) & (key <= last[:, None])",
        "key >= first[:, None]",
        "tokens of a prompt read those after them",
    ),
    "tiles_joined_unscaled": Fault(
        ATTENTION + "::_combine",
        "torch.exp(peaks - top)",
        "is_tile[:, :, None].float()",
        "each tile counts alike, whatever its scores",
    ),
    "least_likely_samples_answer": Fault(
        SAMPLES + "::_rank",
        "-whole.cumulative_logprob",
        "whole.cumulative_logprob",
        "best_of returns the worst",
    ),
    "failed_sample_is_the_best": Fault(
        SAMPLES + "::_rank",
        'whole.finish_reason == "error"',
        "False",
        "a sample that failed at once has the highest log-probability of all",
    ),
    "best_of_those_who_were_first": Fault(
        SAMPLES + "::SampleAnswers._grow",
        "self.num_open",
        "self.num_open > len(self.samples) - self.num_answers",
        "the shortest samples are taken for the best, and others answer twice",
    ),
    "equal_samples_in_another_order": Fault(
        SAMPLES + "::SampleAnswers._grow",
        "sorted(held, key=_rank)",
        "sorted(reversed(held), key=_rank)",
        "which of two equal samples is the answer is not what their order says",
    ),
}
