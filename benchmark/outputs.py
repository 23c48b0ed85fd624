"""Check that a command can write its outputs before it runs, so that no run is lost for a missing folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def file(text: str | Path) -> Path:
    """Return a path at which a file can be written; raises OSError for another."""
    path = Path(text)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: make the folder {path.parent} first")
    return _may_write(path, path if path.exists() else path.parent)


def picture(text: str) -> Path:
    """Return a path for a picture; raises ArgumentTypeError for a name that names no kind of picture."""
    path = file(text)
    if path.suffix not in PICTURES:
        kinds = ", ".join(PICTURES)
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a picture; it must end in {kinds}")
    return path


def folder(text: str) -> Path:
    """Return a folder in which files can be written, once it and its parents are made; raises OSError."""
    path = Path(text)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be a folder: {there} is a file")
    return _may_write(path, there)


def _may_write(path: Path, there: Path) -> Path:
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {there} may not be written to")
    return path
