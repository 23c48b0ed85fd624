"""Which faults are seeded where prompts get their log-probabilities?"""

from __future__ import annotations

from tests.mutation.fault import Fault

REQUEST, FOLLOWERS = "continuous_batching/request.py", "continuous_batching/sampling/parallel_samples.py"
PROMPTS, POOLING = "models/sampling/prompt_logprobs.py", "models/sampling/pooling.py"

PROMPT_FAULTS = {
    "cached_prompt_told_of_its_end": Fault(
        REQUEST + "::Request.num_findable",
        "self.num_scored if self.is_scoring else len(self.tokens) - 1",
        "len(self.tokens) - 1",
        "what is found in the cache is not computed, and nothing is told of it",
    ),
    "preempted_prompt_told_twice": Fault(
        REQUEST + "::Request.come_back",
        "self.num_scored = max(self.num_scored, min(num_computed, len(self.prompt) - 1))",
        "pass",
        "what was told before the preemption is told again",
    ),
    "recomputed_positions_told_again": Fault(
        PROMPTS + "::wanted_of",
        "np.maximum(batch.starts, known)",
        "batch.starts",
        "where fewer pages are found than were computed, some positions come twice",
    ),
    "new_leader_starts_anew": Fault(
        FOLLOWERS + "::ParallelSamples.part",
        "first.followers, first.num_scored = followers[1:], leader.num_scored",
        "first.followers = followers[1:]",
        "what the one that gave up was told is told again to those that share it",
    ),
    "follower_tells_what_it_shares": Fault(
        FOLLOWERS + "::ParallelSamples.fork",
        "follower.num_scored = follower.num_prompt_tokens - 1",
        "pass",
        "a follower that found no row adds its own to its leader's",
    ),
    "cached_beginning_left_out_of_a_mean": Fault(
        REQUEST + "::Request.is_scoring",
        'self.params.prompt_logprobs is not None or self.params.pooling == "mean"',
        "self.params.prompt_logprobs is not None",
        "a mean is of the tokens that were computed, not of those that were found",
    ),
    "embedding_of_the_first_chunk_s_end": Fault(
        POOLING + "::pooled_of",
        "np.maximum(batch.starts, firsts)",
        "np.maximum(batch.starts, firsts * 0)",
        "what every chunk comes to is added to the last token's state",
    ),
    "embedding_of_a_neighbour": Fault(
        POOLING + "::pooled_of",
        "(np.cumsum(lens) - batch.stops)[spans]",
        "-batch.starts[spans]",
        "every prompt gets the states of the first one in its step",
    ),
    "labels_behind_another_token": Fault(
        POOLING + "::_labelled",
        "np.cumsum(pooled.counts)[places] - 1",
        "places",
        "a document is judged by another one's last token",
    ),
}
