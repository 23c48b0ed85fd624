"""Which keys has a recipe for how clients are served?"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.keys import key

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """How clients are served; where and under which name, the command line says."""

    max_requests: int = key(
        "requests that may be in the server at once, each sample of one counted; more are told to come again",
        default=1024,
        least=1,
        most=2**20,
    )
    max_body_mib: float = key(
        "the largest body of a request; reading one of 2 MiB may keep others waiting for half a second",
        default=2.0,
        least=0.001,
        most=1024,
    )
    text_threads: int = key(
        "threads that turn long prompts and conversations into tokens", default=2, least=1, most=256
    )
    max_unread_tokens: int = key(
        "tokens that a client may leave unread; then its answer is cut off", default=4096, least=1, most=2**24
    )
    share_prefixes: bool = key(
        "let the keys of different clients share pages, so that one can time what others have sent",
        default=False,
    )
    drain_s: float = key(
        "after SIGTERM, how long requests may go on before they are cut off",
        default=30.0,
        least=0,
        most=_DAY_S,
    )
    step_timeout_s: float = key(
        "an engine that has not answered for so long is ended and started anew",
        default=60.0,
        least=1,
        most=_DAY_S,
    )
    spare_engine: bool = key(
        "keep a process of 150 MiB that has imported what an engine needs, to follow a lost one sooner",
        default=True,
    )
    start_timeout_s: float = key(
        "an engine that is not ready after so long is ended and started anew",
        default=1800.0,
        least=1,
        most=_DAY_S,
    )
