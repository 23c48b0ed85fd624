"""The bounds of what a request says, for all borders at which one comes in: HTTP, and other engines.

What is within them can be stored in the columns of the slots, in logs and in messages as it is.
"""

from __future__ import annotations

LAST_ID = 2**31 - 1  # token ids and priorities have 32 bits
LONGEST_NAME = 1024  # characters of a tenant's name, or of a salt
MOST_LEASE_S = 86_400  # for which pages may be held for another engine: a day
