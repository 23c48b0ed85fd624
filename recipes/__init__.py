"""From a YAML file to an engine; `python -m recipes` shows one."""

import signal
import sys

# While `python -m` imports a command, which takes seconds, ctrl-C ends it at once: a KeyboardInterrupt inside
# an import would be a traceback, or be lost in a library that goes on without what it could not import.
# `recipes.schema.verb.run` takes it back. Where SIGINT is ignored, as under `nohup ... &`, it stays so.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
