"""Remake the table of which operator and argument each release of torch_npu has.

    python -m scripts.torch_npu_releases              read the wheels of all releases in the table again
    python -m scripts.torch_npu_releases VERSION ...  those of these releases, and keep the others

Each wheel is downloaded by pip to a temporary folder (some 40 MB), read and deleted; nothing is installed.
The releases are then printed with what each lacks of what this project calls.
"""

from __future__ import annotations

import argparse
import json

from borders.files import whole_file
from devices.torch_npu_releases import FILE, completed, releases, table_of
from doctor.wheels import order, releases_of
from recipes.schema import verb


def main(argv: list[str]) -> int:
    """Write the table and print a line for each release; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.torch_npu_releases",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("versions", metavar="VERSION", nargs="*")
    known = releases() if FILE.is_file() else {}
    found = {**known, **releases_of(parser.parse_args(argv).versions or known)}
    found = {version: found[version] for version in sorted(found, key=order)}
    with whole_file(FILE) as file:
        file.write(json.dumps(table_of(found), indent=1) + "\n")
    for version, release in completed(found).items():
        print(f"{version}: {'; '.join(release.lacks()) or 'has every call'}")
    return 0


if __name__ == "__main__":
    verb.run(main)
