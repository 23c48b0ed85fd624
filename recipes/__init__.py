"""Build an engine from a YAML recipe; `python -m recipes` shows one."""

import gc
import signal
import sys

# What a command imports stays, so that collections meanwhile take 0.3 s and find nothing. They begin in
# `recipes.schema.verb.run`.
if sys.argv[:1] == ["-m"]:
    gc.disable()

# While `python -m` imports a command, which takes seconds, ctrl-C ends it at once: a KeyboardInterrupt inside
# an import would be a traceback, or be swallowed by a library that continues without what it could not
# import. `recipes.schema.verb.run` restores Python's handler. SIGINT stays ignored where it was, as it is
# under `nohup`.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
