"""Which faults are seeded in how ranks hear the leader, and in how one that is lost is found?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.graph_faults import GRAPHS

ENGINE = "continuous_batching/engine.py"
SCHEDULER = "continuous_batching/scheduling/scheduler.py"
RECORDER, LISTENERS, FOLLOWER, REPLAY = (
    f"continuous_batching/recording/{name}.py" for name in ("recorder", "listeners", "follower", "replay")
)
BUILT = "recipes/build/engine.py"
IN_FLIGHT, SHARE = "continuous_batching/scheduling/in_flight.py", "models/share.py"
STAGE_RUNNER, WAITS = "models/stage_runner.py", "benchmark/micro/stages.py"
RANK_TESTS = (
    "tests/continuous_batching/test_follower.py",
    "tests/continuous_batching/test_starting_ranks.py",
)
BUILT_RANK_TESTS = ("tests/recipes/test_tensor_ranks.py",)
RANK_TESTS_OF = dict.fromkeys((ENGINE, RECORDER, LISTENERS, FOLLOWER), RANK_TESTS) | {
    BUILT: BUILT_RANK_TESTS,
    REPLAY: ("tests/continuous_batching/test_recorder.py",),
    STAGE_RUNNER: ("tests/models/test_stage_runner.py",),
    WAITS: ("tests/benchmark/test_stages.py",),
}

RANK_FAULTS = (
    Fault(
        "resize_told_too_late",
        ENGINE,
        """        self.observer.resized(num_pages, give_up)  # before ranks wait for each other within it
        self.runner.resize(num_pages, self.scheduler.tables.take_copies())
""",
        """        self.runner.resize(num_pages, self.scheduler.tables.take_copies())
        self.observer.resized(num_pages, give_up)
""",
        "the leader waits in a resize for ranks that have not heard of it",
    ),
    Fault(
        "forgotten_by_the_leader_alone",
        REPLAY,
        "        scheduler.prefix.forget_all()\n",
        "        pass\n",
        "ranks find pages of a run before, which the leader computes again",
    ),
    Fault(
        "broken_recording_closed",
        RECORDER,
        "                self._is_broken = True\n",
        "                pass\n",
        "a recording that misses entries says that nothing is missing",
    ),
    Fault(
        "masks_untold",
        RECORDER,
        "allowed[:4],  # the first, an int32\n",
        "None,\n",
        "ranks that follow take a masked row for a greedy one, and wait for logits that nobody brings",
    ),
    Fault(
        "overlap_not_followed",
        FOLLOWER,
        "        if self._overlap:\n",
        "        if False:\n",
        "ranks wait in a broadcast for one that calls none",
    ),
    Fault(
        "another_engine_followed",
        FOLLOWER,
        "        for name, mine, leaders in differences(own, header.facts):\n",
        "        for name, mine, leaders in differences(own, own):\n",
        "a rank with other settings goes on until something differs",
    ),
    Fault(
        "rank_that_ended_unseen",
        LISTENERS,
        "            if not data and not self._is_closed:\n",
        "            if not data and self._is_closed:\n",
        "the engine waits for a rank that has ended",
    ),
    Fault(
        "silent_rank_unseen",
        LISTENERS,
        "        if any(now_s - rank.heard_s > self.limit_s for rank in self._ranks):\n",
        "        if False:\n",
        "a rank that is stopped is never named",
    ),
    Fault(
        "long_step_unseen",
        LISTENERS,
        "        if now_s - since_s > self.limit_s:\n",
        "        if False:\n",
        "a step that waits for ever is never ended",
    ),
    Fault(
        "start_limited_as_a_step",
        LISTENERS,
        "        if not self.has_started:\n",
        "        if False:\n",
        "a rank that loads longer than a step may take ends the engine",
    ),
    Fault(
        "lost_at_once",
        FOLLOWER,
        "                if not self._has_ended.wait(_LAST_WORDS_S):\n",
        "                if True:\n",
        "a rank that ends in order after its leader is killed before it has cleaned up",
    ),
    Fault(
        "endless_start",
        LISTENERS,
        "        if took_s > self._start_limit_s:\n",
        "        if False:\n",
        "a start that hangs is never ended",
    ),
    Fault(
        "last_record_lost",
        LISTENERS,
        "        self._records.put(last)\n",
        "",
        "ranks take the end in order for the loss of their leader",
    ),
    Fault(
        "pages_of_this_rank",
        BUILT,
        "    pages = world.least(memory.num_pages, machine.device)\n",
        "    pages = memory.num_pages\n",
        "a rank with less memory has fewer pages than the leader gives out",
    ),
    Fault(
        "row_in_two_batches",
        IN_FLIGHT,
        "        if self._depth > 1:\n            return self.rows\n",
        "",
        "a row is computed twice, by batches in two stages",
    ),
    Fault(
        "first_batch_takes_all",
        SCHEDULER,
        "            rows = rows[:most]\n",
        "            pass\n",
        "the other stages have nothing to compute",
    ),
    Fault(
        "pages_moved_under_a_stage",
        SCHEDULER,
        "        if self._compaction is not None and (self.depth == 1 or not ahead):\n",
        "        if self._compaction is not None:\n",
        "the last stage reads pages where they are not yet",
    ),
    Fault(
        "layer_of_two_stages",
        SHARE,
        "for each in (self.stage, self.stage + 1))\n        return range(first, stop)\n\n    def most",
        "for each in (self.stage, self.stage + 1))\n        return range(first, stop + 1)\n\n    def most",
        "a layer is computed twice",
    ),
    Fault(
        "head_of_the_first_stage",
        SHARE,
        '        return name.startswith("lm_head.") and not self.is_last\n',
        '        return name.startswith("lm_head.") and self.is_last\n',
        "a stage complains of a head that it has no place for",
    ),
    Fault(
        "windows_of_the_first_layers",
        SHARE,
        "            windows=config.windows[layers.start : layers.stop],\n",
        "            windows=config.windows[: len(layers)],\n",
        "layers of the last stage see as far as those of the first",
    ),
    Fault(
        "captured_where_the_last_stage_launches",
        STAGE_RUNNER,
        "wanted, graphs = of_prompts.wanted_of(batch, self.slots), self.graphs",
        "last = self.decoder.share.is_last\n"
        "        wanted = of_prompts.wanted_of(batch, self.slots) if last else None\n"
        "        graphs = self.graphs",
        "a stage sends as many rows as are captured, and the next receives as many as there are",
    ),
    Fault(
        "inputs_of_a_later_table",
        STAGE_RUNNER,
        "        compute = self._prepared(batch)\n",
        "        compute = lambda: self._prepared(batch)()\n",
        "the leader reads pages that were moved for a batch after this one",
    ),
    Fault(
        "leader_waits_for_its_neighbours",
        STAGE_RUNNER,
        "        if share.is_last and share.tensor == 0:\n",
        "        if False:\n",
        "stages compute one batch after the other",
    ),
    Fault(
        "sizes_of_own_layers",
        GRAPHS,
        "attention.graph_sizes(wanted, len(spans), most_layers, joins=joins)",
        "attention.graph_sizes(wanted, len(spans), joins=joins)",
        "a shorter stage captures a size that the longer has no streams for",
    ),
    Fault(
        "inputs_for_two_batches",
        GRAPHS,
        "self._num_inputs, self._turn = max(2, stages), 0",
        "self._num_inputs, self._turn = 2, 0",
        "with three stages, the third batch takes the place of the first, which nobody has computed",
    ),
    Fault(
        "wait_of_the_later_batch",
        WAITS,
        "self.waited_s[KINDS[has_prompt + self._had_prompt]]",
        "self.waited_s[KINDS[2 * has_prompt]]",
        "a wait between a prompt and decodes counts as one between prompts",
    ),
    Fault(
        "wait_counted_as_computing",
        WAITS,
        " - (self._links.waited_s - since_s)",
        "",
        "the simulation learns that a stage computes while it waits",
    ),
    Fault(
        "receive_without_a_name",
        "models/group.py",
        '        self.inside = "receive"\n',
        "",
        "a stage that waits for another is said to be behind",
    ),
)
