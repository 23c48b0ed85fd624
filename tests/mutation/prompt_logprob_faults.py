"""Which faults are seeded where prompts get their log-probabilities?"""

from __future__ import annotations

from tests.mutation.fault import Fault

REQUEST, FOLLOWERS = "continuous_batching/request.py", "continuous_batching/sampling/parallel_samples.py"
PROMPTS, POOLING = "models/sampling/prompt_logprobs.py", "models/sampling/pooling.py"

PROMPT_FAULTS = (
    Fault(
        "cached_prompt_told_of_its_end",
        REQUEST,
        "return self.num_scored if self.is_scoring else len(self.tokens) - 1",
        "return len(self.tokens) - 1",
        "what is found in the cache is not computed, and nothing is told of it",
    ),
    Fault(
        "preempted_prompt_told_twice",
        REQUEST,
        "self.num_scored = max(self.num_scored, min(num_computed, len(self.prompt) - 1))",
        "pass",
        "what was told before the preemption is told again",
    ),
    Fault(
        "recomputed_positions_told_again",
        PROMPTS,
        "starts = np.maximum(batch.starts, known)",
        "starts = batch.starts",
        "where fewer pages are found than were computed, some positions come twice",
    ),
    Fault(
        "new_leader_starts_anew",
        FOLLOWERS,
        "first.followers, first.num_scored = followers[1:], leader.num_scored",
        "first.followers = followers[1:]",
        "what the one that gave up was told is told again to those that share it",
    ),
    Fault(
        "follower_tells_what_it_shares",
        FOLLOWERS,
        "follower.num_scored = follower.num_prompt_tokens - 1",
        "pass",
        "a follower that found no row adds its own to its leader's",
    ),
    Fault(
        "cached_beginning_left_out_of_a_mean",
        REQUEST,
        'or self.params.pooling == "mean"\n',
        "\n",
        "a mean is of the tokens that were computed, not of those that were found",
    ),
    Fault(
        "embedding_of_the_first_chunk_s_end",
        POOLING,
        "starts = np.maximum(batch.starts, firsts)",
        "starts = np.maximum(batch.starts, firsts * 0)",
        "what every chunk comes to is added to the last token's state",
    ),
    Fault(
        "embedding_of_a_neighbour",
        POOLING,
        "offsets = (np.cumsum(lens) - batch.stops)[spans]",
        "offsets = -batch.starts[spans]",
        "every prompt gets the states of the first one in its step",
    ),
    Fault(
        "labels_behind_another_token",
        POOLING,
        "at = pooled.at[np.cumsum(pooled.counts)[places] - 1]",
        "at = pooled.at[places]",
        "a document is judged by another one's last token",
    ),
)
