"""Serve several servers as one, through a router that knows which pages each has computed.

    python -m scripts.route --replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002 \\
        [--recipe recipes/tiny/cpu.yaml] [--port 8080]

The router speaks OpenAI's API at /v1, as the servers behind it do. With the replicas' --recipe it hashes
prompts as they do and, where they publish their pages (`cache.events`), knows which pages each holds; other
servers are judged by the text that was sent to them. /fleet, and the page at /, show where requests went and
why. Replicas are added and removed by POST /fleet/add?http://HOST:PORT and /fleet/remove?..., or found as the
addresses of a name (--discover).
"""

from __future__ import annotations

import argparse
import os

from continuous_batching.routing.routing import ROUTES
from continuous_batching.routing.splitting import SPLITS
from recipes.schema import verb
from recipes.schema.numbers import real, whole
from scripts.serve import add_tls
from serving.metrics.logs import FORMATS
from serving.router.server import RouterOptions, run_router


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.route", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = top.add_argument
    add("overrides", nargs="*", metavar="key=value", help="as the replicas' recipe has them")
    add("--replica", action="append", default=[], dest="replicas", metavar="URL", help="http[s]://HOST:PORT")
    add("--discover", action="append", default=[], metavar="URL", help="each address of the name is one")
    add("--recipe", help="that of the replicas; none: by text alone")
    add("--profile", help="as the replicas have it")
    add("--route", choices=ROUTES, default="prefix", help="how to choose")
    add(
        "--split",
        choices=SPLITS,
        default="cost",
        help="when replicas of prompts compute for those of answers",
    )
    add("--host", default="127.0.0.1", help="the address to listen at")
    add("--port", type=whole(0, 2**16 - 1), default=8080, help="0: any that is free, which is logged")
    add("--most-open", type=whole(1, 2**20), default=256, metavar="N", help="requests at a replica at once")
    add("--drain-s", type=real(1e-3, 86_400), default=30.0, help="how long requests may go on after SIGTERM")
    add("--keep-alive-s", type=real(0, 86_400), default=15.0, help="comments in silent streams; 0: none")
    add(
        "--served-model-name",
        dest="model_name",
        metavar="NAME",
        help="what replicas call the recipe's model, where they serve several",
    )
    add("--api-keys", metavar="FILE", help="the file that the replicas have")
    add_tls(top)
    add("--tls-authority", metavar="FILE", help="PEM: replicas at https://HOST:PORT have its certificates")
    add("--log-format", choices=FORMATS, default="text", help="json: an object a line")
    add("--log-requests", action="store_true", help="a line for each request, without its text")
    return top


def main(argv: list[str]) -> int:
    """Route until a signal."""
    return run_router(RouterOptions(**vars(parser().parse_intermixed_args(argv))))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    verb.run(main)
