"""Hold the commands, each run by `python -m scripts.NAME`."""

import recipes  # noqa: F401 - which says how ctrl-C ends a command that is still importing
