"""Keep what clients name by paths within one folder, and keep that folder's own path from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from borders.refusal import BadRequest


class Root:
    """The folder below which everything lies that a client may name; the recipe's `key` says which it is."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def within(self, path: str, field: str) -> Path:
        """Return the folder of a path below the root; raises BadRequest for a path that leads elsewhere."""
        try:
            folder = (self._folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise BadRequest(field, f"is no path: {self.hidden(str(error))}") from error
        if not folder.is_relative_to(self._folder.resolve()):
            raise BadRequest(field, f"leads out of {self._key}", value=path)
        return folder

    def check_links(self, files: Iterable[Path], path: str, field: str) -> None:
        """Raise BadRequest for files of a path there of which one is a link to any other file."""
        for each in files:
            try:
                file = each.resolve()
            except (OSError, RuntimeError) as error:
                problem = self.hidden(str(error))
                raise BadRequest(field, f"cannot be used: {problem}", value=path) from error
            if not file.is_relative_to(self._folder.resolve()):
                raise BadRequest(
                    field,
                    f"holds {each.name}, a link that leads out of {self._key}",
                    value=path,
                    fix="put the file itself there",
                )

    def hidden(self, text: str) -> str:
        """Return a text that a client may read, without the folder's path on this machine."""
        for root in sorted(
            {str(self._folder.resolve()), os.path.abspath(self._folder)}, key=len, reverse=True
        ):
            if root != os.sep:
                # The path must not be a part of a longer name.
                path = rf"(?<![\w./~-]){re.escape(root)}(?:(/)|(?![\w~-]|\.\w))"
                text = re.sub(path, lambda found: "" if found[1] else self._key, text)
        return text
