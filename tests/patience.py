"""How long a test waits for what another process must do: the patience of the whole suite, in one place.

It is no claim on speed: a machine at rest needs a hundredth of it. What must not happen is never waited for.
"""

PATIENCE_S = 300.0
