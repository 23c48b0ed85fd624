"""How does a command end when its user made a mistake? With one line, and status 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command on its arguments and exit; an unusable recipe, file or option is one line on stderr."""
    try:
        status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
