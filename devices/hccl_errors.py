"""Name the link that HCCL complains of, from the words in which a collective failed and from its log.

What HCCL says of a lost link depends on when it notices. While links are made (EI0006) its error names no
rank; the log of the process has a table of both ends, or a line with the ranks of both. While a task waits
(EI0002, or an event of error 107020) the error names the rank that did not send, or the device that lost its
heartbeat. Ranks are counted as in HCCL's communicator: those of the engine, unless it has stages or
communicators of some of the ranks.

Sources: CANN, troubleshooting, EI0002 and EI0006; HCCL, hccl_socket_manager.cc and transport_manager.cc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

MOST_LOG_BYTES = 2**18  # The end of a process's log is read, up to so many
_UNMADE = "EI0006"  # links that are made; the log has their tables, also of those that were made again
_CODES = ("EI0002", _UNMADE, "107020")
# | 192.0.2.199(7) | 16666 | 192.0.3.198(3) | 0 | client | time out | DISABLE |
_TABLE = re.compile(
    r"\|\s*[0-9a-fA-F.:]{3,45}\((\d{1,6})\)\s*\|\s*\d{1,10}\s*\|\s*[0-9a-fA-F.:]{3,45}\((\d{1,6})\)"
    r"\s*\|[^|\n]{1,40}\|[^|\n]{1,40}\|([^|\n]{1,40})\|"
)
_USER_RANKS = re.compile(r"localUserrank\[(\d{1,6})\].{1,200}?remoteUserrank\[(\d{1,6})\]", re.DOTALL)
_NOTIFY = re.compile(r"Notify record from remote rank:? ?\[(\d{1,6})\]")
_LOST = re.compile(
    r"Cluster Exception Location\[IP/ID\]:\[([^\]\n]{1,80})\].{1,200}?ExceptionType:\[([^\]\n]{1,80})\]",
    re.DOTALL,
)


def explained(words: str, rank: int, log: str = "") -> str:
    """Return an error's words behind the link that failed from this rank, or unchanged if none is named.

    `log` is the end of what HCCL has logged in this process.
    """
    code = next((each for each in _CODES if each in words), None)
    if code is None:
        return words
    found = _link(f"{words}\n{log}" if code == _UNMADE else words, rank)
    return words if found is None else f"{found} ({code}): {words}"


def _link(said: str, rank: int) -> str | None:
    if (waited := _NOTIFY.findall(said)) and int(waited[-1]) != rank:
        return f"the link from rank {rank} to rank {waited[-1]} brings nothing"
    for far, near, status in reversed(_TABLE.findall(said)):
        return f"the link from rank {near} to rank {far} cannot be made: {status.strip()}"
    for near, far in reversed(_USER_RANKS.findall(said)):
        return f"the link from rank {near} to rank {far} cannot be made"
    for device, kind in _LOST.findall(said):
        return f"rank {rank} has lost device {device}: {kind}"
    return None


def end_of_log(pid: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return the end of the newest log that CANN has written for a process; empty if there is none."""
    root = environment.get("ASCEND_PROCESS_LOG_PATH") or Path(environment.get("HOME", "/")) / "ascend" / "log"
    try:
        logs = list(Path(root).glob(f"debug/plog/plog-{pid}_*.log"))
        with max(logs, key=lambda path: path.stat().st_mtime).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            return file.read(MOST_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):  # no log, or it is gone again: the words of the error are all there is
        return ""
