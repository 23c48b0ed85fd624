"""How does a process become an engine that serves?

    python -m serving.engine.main SOCKET RECIPE [key=value ...] [--profile NAME]

It begins when it reads BEGIN from its standard input, and ends when its parent does, however that ends.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import zmq

from recipes.schema import verb
from recipes.schema.command_line import add_recipe

if TYPE_CHECKING:
    from continuous_batching.engine import Engine

log = logging.getLogger(__name__)


def _end_with_parent(engines: list[Engine]) -> None:
    """End when the parent does, or when it says so: only it holds our standard input, a pipe, open.

    What observes `engines` is closed before: a recording then says that nothing of it is missing.
    """

    def wait() -> None:
        os.read(0, 1)  # unbuffered: a normal end would wait for the buffer's lock
        try:
            for engine in engines:
                engine.close()
        finally:
            os._exit(0)  # the engine may be in a step, and nobody waits for it

    threading.Thread(target=wait, daemon=True).start()


def main(argv: list[str]) -> int:
    """Build the engine and serve; 2 for a recipe that cannot be used."""
    options = argparse.ArgumentParser(prog="python -m serving.engine.main")
    options.add_argument("socket")
    add_recipe(options)
    asked = options.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they are for the server, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    gc.disable()  # What is imported stays: a collection would visit 300,000 objects and find no garbage
    from continuous_batching.recording.listeners import RankLost
    from continuous_batching.system_error import in_one_line
    from recipes.build.engine import build
    from recipes.build.ranks import LOST
    from recipes.schema.reader import load
    from serving.engine.expert_readings import ExpertReadings
    from serving.engine.facts import facts_of, tier_reading
    from serving.engine.messages import HURRY
    from serving.engine.page_exchange import exchange_of
    from serving.engine.worker import Worker
    from serving.own_processors import KnownProcessors
    from serving.text.tokenizer import Text

    gc.freeze()
    gc.enable()

    while (word := os.read(0, 1)) == HURRY:  # a spare process waits here, with all imports done
        pass
    if not word:
        return 0
    engines: list[Engine] = []
    _end_with_parent(engines)
    try:
        recipe = load(asked.recipe, asked.overrides, asked.profile)
        built = build(recipe)
        processors = KnownProcessors.of(recipe, built.config.vocab_size)
        pages = exchange_of(recipe, built)
    except (ValueError, OSError) as error:
        log.error("%s", in_one_line(error))
        return verb.UNUSABLE
    engines.append(built.engine)
    gc.collect()
    gc.freeze()  # these objects stay: a collection that visits them delays a step by a tenth of a second
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)  # bounded by the requests that the server lets in
    socket.connect(asked.socket)
    facts = facts_of(built, prefix_sharing=recipe.cache.prefix_sharing)
    path = recipe.model.path
    read_experts = ExpertReadings(built).due
    load_text = partial(Text.load, path) if path else lambda: None
    reads = read_experts, partial(tier_reading, built.tier)
    worker = Worker(built.engine, socket, facts, load_text, *reads, processors, built.adapters, pages)
    if built.ranks is not None:
        built.ranks.ends_process = True  # an idle engine is lost, too, and another can be started
    try:
        worker.serve()
    except RankLost:  # whose name was logged when it was lost
        os._exit(LOST)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
