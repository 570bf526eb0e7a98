"""Constraints for an environment that is not ours: its torch stays as it is, what it has is not pinned.

Prints, for the interpreter that runs it, the lines of constraints.txt for packages that are missing here;
torch is pinned to the version that is installed, so that pip refuses rather than replaces it.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(name: str) -> "str | None":
    """The version of a distribution in this environment."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
    name = line.split("==")[0]
    if name == "torch" and installed("torch"):
        print(f"torch=={installed('torch')}")
    elif not line.startswith("#") and not installed(name):
        print(line)
