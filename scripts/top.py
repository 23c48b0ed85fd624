"""Show what a server is doing now.

    python -m scripts.top URL [--every SECONDS] [--once]

The view has slots, pages, queue and rates, from the server's /metrics, until ctrl-C; the URL is
http://HOST:PORT. A server that needs a key gets the environment's API_KEY. --once prints one frame, made from
two readings, and ends.
"""

from __future__ import annotations

import argparse
import os
import time

from rich.console import Console

from recipes.schema import verb
from recipes.schema.numbers import real
from serving.terminal_view import LONGEST_INTERVAL_S, frame, read, watch

LEAST_INTERVAL_S = 0.01  # a shorter interval would burden the server


def main(argv: list[str]) -> None:
    """Watch, or print once."""
    options = argparse.ArgumentParser(
        prog="python -m scripts.top", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("url", help="such as http://127.0.0.1:8000")
    options.add_argument(
        "--every",
        type=real(LEAST_INTERVAL_S, LONGEST_INTERVAL_S),
        default=1.0,
        metavar="SECONDS",
        help="between readings",
    )
    options.add_argument("--once", action="store_true", help="print one frame")
    asked = options.parse_args(argv)
    if not asked.url.startswith(("http://", "https://")):
        raise ValueError(f"{asked.url!r} is no URL; it begins with http:// or https://")
    if not asked.once:
        watch(asked.url, asked.every)
        return
    before = read(asked.url)
    time.sleep(asked.every)
    Console(width=None if os.isatty(1) else 100).print(frame(read(asked.url), before))


if __name__ == "__main__":
    verb.run(main)
