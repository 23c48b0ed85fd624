"""Run an engine that serves as a process of its own.

    python -m serving.engine.main SOCKET RECIPE [key=value ...] [--profile NAME]

The process begins when it reads BEGIN and a line from its standard input, and ends when its parent does,
however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import zmq

from recipes.cluster.spare_process import is_needed, lowest_session_niceness
from recipes.schema import verb
from recipes.schema.command_line import add_recipe

if TYPE_CHECKING:
    from continuous_batching.engine import Engine
    from models.step.profiler import StepProfiler
    from recipes.cluster.rank_process import SpareRanks
    from recipes.cluster.ranks import Ranks
    from recipes.schema.recipe import Recipe
    from serving.engine.worker import Worker

log = logging.getLogger(__name__)


def _remove_socket(address: str) -> None:
    """Remove the socket's file and its folder, which a parent that was killed leaves behind."""
    file = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):  # the parent removes them once the engine serves
        file.unlink(missing_ok=True)
        file.parent.rmdir()


def _end_with_parent(engines: list[Engine], address: str) -> None:
    """End when the parent ends or writes a byte: only the parent holds our standard input, a pipe, open.

    The observers of `engines` are closed first; a recording then states that it is complete.
    """

    def wait() -> None:
        os.read(0, 1)  # an unbuffered read, since a normal exit would wait for the buffer's lock
        _remove_socket(address)
        try:
            for engine in engines:
                engine.close()
        finally:
            os._exit(0)  # the engine may be in a step, and nobody waits for it

    threading.Thread(target=wait, daemon=True).start()


def _spare_ranks(options: argparse.Namespace) -> SpareRanks:
    """Start the further ranks of this machine, so that they import before this engine is needed.

    A recipe that cannot be read now is reported when it is read again, once the engine is needed; ranks that
    the system has no room for now are then started as without a spare process.
    """
    from recipes.cluster.cluster import find_cluster
    from recipes.cluster.rank_process import SpareRanks
    from recipes.schema.reader import load

    with contextlib.suppress(ValueError, OSError):
        parallel = load(options.recipe, options.overrides, options.profile).parallel
        return SpareRanks(len(find_cluster(parallel, os.environ).ranks_of(0, parallel.ranks)) - 1)
    return SpareRanks(0)


def _wait_to_begin(options: argparse.Namespace) -> tuple[str | None, SpareRanks | None]:
    """Wait for BEGIN and return the line that follows it, or None where the server has ended.

    Nothing is read beyond the line: the next byte ends this process. A spare process waits here, with all
    imports done; the further ranks, which are returned too, import meanwhile.
    """
    from serving.engine.messages import BEGIN, HURRY

    read, spares, is_hurried = b"", None, False
    with contextlib.ExitStack() as waiting:
        while not read.endswith(b"\n"):
            if spares is None and not read and not is_needed(0):
                spares = _spare_ranks(options)
                if len(spares) and not is_hurried:
                    waiting.enter_context(lowest_session_niceness())
            byte = os.read(0, 1)
            if not byte:
                return None, spares
            if byte == HURRY and not read:
                is_hurried = True
            else:
                read += byte
    return read.removeprefix(BEGIN).decode().strip(), spares


def _connected(address: str) -> zmq.Socket[bytes]:
    socket = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)  # the number of messages is bounded by the requests that the server accepts
    socket.linger = 0  # an engine that cannot start ends without waiting for its reader
    socket.connect(address)
    return socket


def _profiler(recipe: Recipe) -> StepProfiler | None:
    from models.step.profiler import StepProfiler

    folder, device = recipe.server.profile, recipe.device
    return None if folder is None else StepProfiler(Path(folder), "cpu" if device.virtual else device.kind)


def _asked(argv: list[str]) -> argparse.Namespace:
    """Read the command line, and let this process log and be ended as an engine."""
    options = argparse.ArgumentParser(prog="python -m serving.engine.main")
    options.add_argument("socket")
    add_recipe(options)
    asked = options.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # these signals are for the server, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    return asked


def main(argv: list[str]) -> int:
    """Build the engine and serve; returns 2 for a recipe that cannot be used."""
    asked = _asked(argv)
    gc.disable()  # What is imported stays: a collection would visit 300,000 objects and find no garbage
    from borders.files import in_one_line
    from borders.start_report import paced
    from recipes.assembly.engine import build
    from recipes.schema.reader import load
    from serving.engine.facts import ExpertReadings, facts_of, tier_reading
    from serving.engine.messages import Starting, encode
    from serving.engine.page_exchange import exchange_of
    from serving.engine.worker import Worker
    from serving.own_processors import KnownProcessors
    from serving.text.tokenizer import Text

    gc.freeze()
    gc.enable()

    learned, spares = _wait_to_begin(asked)
    if learned is None:
        _remove_socket(asked.socket)
        return 0  # the ranks that wait end with it
    engines: list[Engine] = []
    _end_with_parent(engines, asked.socket)
    socket = _connected(asked.socket)
    try:
        recipe = load(asked.recipe, asked.overrides, asked.profile)
        tell = paced(lambda doing: socket.send(encode(Starting(doing))))
        built = build(recipe, tell=tell, learned=learned, spares=spares)
        processors = KnownProcessors.of(recipe, built.config.vocab_size)
        pages = exchange_of(recipe, built)
    except (ValueError, OSError) as error:
        log.error("%s", in_one_line(error))
        return verb.UNUSABLE
    if spares is not None:
        spares.close()  # those of a recipe that had more ranks before
    engines.append(built.engine)
    gc.collect()
    gc.freeze()  # a collection that visits these lasting objects would delay a step by 0.1 s
    facts = facts_of(built, prefix_sharing=recipe.cache.prefix_sharing)
    load_text = partial(Text.load, recipe.model.path, is_told=False) if recipe.model.path else lambda: None
    reads = ExpertReadings(built).due, lambda: tier_reading(built.runner.cache.tier)
    worker = Worker(
        *(built.engine, socket, facts, load_text, *reads, processors),
        questions=built.questions,
        pages=pages,
        profiler=_profiler(recipe),
        learned=built.learned,
        live=built.live,
    )
    _serve(worker, built.ranks)
    return 0


def _serve(worker: Worker, ranks: Ranks | None) -> None:
    """Serve until the server needs no engine, or end this process where a rank is lost, or was before."""
    from continuous_batching.recording.listeners import RankLost
    from recipes.cluster.ranks import LOST

    try:
        if ranks is not None:
            ranks.ends_process = True  # an idle engine is then lost as well, and another can be started
            ranks.check()
        worker.serve()
    except RankLost:  # the lost rank's name has been logged
        os._exit(LOST)


def run(argv: list[str]) -> NoReturn:
    """Run `main`, and end the process at once.

    The interpreter would first wait for its thread pools, which may read weights or an adapter for minutes,
    and the server would be told only then that its engine has ended.
    """
    try:
        status = main(argv)
    except Exception:
        log.exception("the engine has failed")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run(sys.argv[1:])
