"""What is a seeded fault?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit that breaks something, as somebody might really write it.

    `old` stands exactly once in `file`; `why` says what is wrong with `new`, or where it was seen.
    """

    name: str
    file: str
    old: str
    new: str
    why: str

    def plant(self, root: Path) -> None:
        """Edit the file under `root`; raises ValueError if the old text is not there exactly once."""
        path = root / self.file
        path.write_text(self.applied_to(path.read_text(encoding="utf-8")), encoding="utf-8")

    def applied_to(self, text: str) -> str:
        """The file's text with the fault in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"fault {self.name}: its old text stands {count} times in {self.file}, not once;"
                " give it the text that stands there now"
            )
        return text.replace(self.old, self.new)
