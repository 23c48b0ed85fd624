"""Serve the page of a server or a router: files of this folder, which load and ask nothing elsewhere.

`page.html` holds the conversation, which is the same in front of an engine and of a fleet; what stands
beside it is `engine.html` or `fleet.html`. The policy lets no text become markup or a script. All files are
read when the module is imported, so that no path of a request reaches the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from starlette.responses import Response

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


_PAGES = {
    each: _read("page.html").replace("<!-- beside -->", _read(f"{each}.html")) for each in ("engine", "fleet")
}
_FILES = {
    f"/page/{path.name}": (_read(path.name), _TYPES[path.suffix])
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
PATHS = tuple(_FILES)  # they hold no secret, and the page needs them before it knows a key


def page(beside: Literal["engine", "fleet"]) -> Response:
    """Return the page with what stands beside the conversation."""
    return Response(_PAGES[beside], headers=_HEADERS, media_type="text/html")


def file(path: str) -> Response:
    """Return the file at one of PATHS."""
    content, media_type = _FILES[path]
    return Response(content, headers=_HEADERS, media_type=media_type)
