"""The longest time that any test waits for what another process must do.

It makes no claim about speed: a machine at rest needs a hundredth of it. What must not happen is never waited
for.
"""

PATIENCE_S = 300.0
