"""Define the bounds of a request's fields for every interface at which one arrives: HTTP and other engines.

Values within them can be stored in the columns of the slots, in logs and in messages as they are.
"""

from __future__ import annotations

LAST_ID = 2**31 - 1  # token ids and priorities have 32 bits
LONGEST_NAME = 1024  # characters of a tenant's name, or of a salt
MOST_LEASE_S = 86_400  # longest time for which pages are held for another engine: a day
