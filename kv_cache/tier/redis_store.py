"""Store pages in a Redis or Valkey server that the engines of many machines share.

Each page is a key below `cb-pages:`. Beside them are the times of use (a sorted set), the sizes (a hash) and
their sum. Updates that belong together are made by a script within the server, by the server's clock, so that
the bound holds whatever engines do concurrently, and no engine leaves half an update behind when it ends. A
server may also evict entries by its own `maxmemory`: they are misses, and their sizes are dropped when their
turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from borders.refusal import one_line
from kv_cache.tier.store import MOST_ENTRY_BYTES, StoreFailed

PREFIX = b"cb-pages:"
_NO_ENTRY = b"no entry"  # stands for a page that is absent
# What the client's parser and handshake raise where a server says what none of its kind does
_FAULTS = (
    redis.RedisError,
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError),
)
USED, SIZES, SUM = PREFIX + b"used", PREFIX + b"sizes", PREFIX + b"sum"
_NOW = "local time = redis.call('TIME') local now = time[1] + time[2] / 1e6 "
_DROP = """
local function drop(name)
    local size = tonumber(redis.call('HGET', KEYS[2], name) or 0)
    redis.call('DEL', name) redis.call('HDEL', KEYS[2], name) redis.call('ZREM', KEYS[1], name)
    return redis.call('DECRBY', KEYS[3], size)
end
"""
_WRITE = (
    _NOW
    + _DROP
    + """
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('INCRBY', KEYS[3], 0) -- a full server refuses this, and lets a script go on that has written
local size, most = #ARGV[1], tonumber(ARGV[2])
local sum = drop(KEYS[4])
while sum + size > most do
    local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)
    if #oldest == 0 then redis.call('SET', KEYS[3], 0) break end
    sum = drop(oldest[1])
end
redis.call('SET', KEYS[4], ARGV[1])
redis.call('ZADD', KEYS[1], now, KEYS[4]) redis.call('HSET', KEYS[2], KEYS[4], size)
redis.call('INCRBY', KEYS[3], size)
return 1
"""
)
# A server that takes no writes now, as one whose memory is full, refuses this, and is read all the same
_TOUCH = _NOW + "for at = 4, #KEYS do redis.pcall('ZADD', KEYS[1], 'XX', now, KEYS[at]) end"
_REMOVE = _DROP + "for at = 4, #KEYS do drop(KEYS[at]) end"


class RedisStore:
    """Entries in the server at `url`, of at most `most_bytes` in total, including those of other identities.

    An entry of this identity has at most `most_entry_bytes`; no more is read of any. A call without an answer
    within `timeout_s` fails. The connection is made by the first call; raises ValueError for a malformed URL.
    """

    def __init__(
        self,
        url: str,
        most_bytes: int,
        identity: bytes,
        timeout_s: float,
        password: str | None = None,
        most_entry_bytes: int = MOST_ENTRY_BYTES,
    ) -> None:
        self._most_bytes, self._most_entry_bytes = most_bytes, most_entry_bytes
        self._own = PREFIX + identity.hex()[:16].encode() + b":"
        self._client = redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # the caller decides when to try again
        )
        self._write = self._client.register_script(_WRITE)
        self._touch = self._client.register_script(_TOUCH)
        self._remove = self._client.register_script(_REMOVE)

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `PageStore.read`; entries that are found count as used."""
        names = [self._name(key) for key in keys]
        try:
            asked = self._client.pipeline(transaction=False)
            for name in names:
                asked.getrange(name, 0, self._most_entry_bytes)
            # What is no string is an error in its place
            said = asked.execute(raise_on_error=False)
            entries = [each if isinstance(each, bytes) else _NO_ENTRY for each in said]
            found = [name for name, entry in zip(names, entries) if entry]
            if found:
                self._touch([USED, SIZES, SUM, *found])
        except _FAULTS as error:
            raise StoreFailed(_in_words(error)) from error
        return [entry or None for entry in entries]

    def write(self, key: bytes, entry: bytes) -> bool:
        """See `PageStore.write`."""
        name = self._name(key)
        try:
            if len(entry) > self._most_bytes or self._client.exists(name):  # checked before the entry is sent
                return False
            return bool(self._write([USED, SIZES, SUM, name], [entry, self._most_bytes]))
        except _FAULTS as error:
            raise StoreFailed(_in_words(error)) from error

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `PageStore.remove`."""
        try:
            self._remove([USED, SIZES, SUM, *map(self._name, keys)])
        except _FAULTS as error:
            raise StoreFailed(_in_words(error)) from error

    def close(self) -> None:
        """See `PageStore.close`."""
        self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._own + key.hex().encode()


def _in_words(error: Exception) -> str:
    is_known = isinstance(error, redis.RedisError)
    return one_line(str(error) if is_known else f"the server answers what none does: {error!r}")
