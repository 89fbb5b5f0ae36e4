"""Where calibrate/, dashboard/ and traces/ lie: in the wheel, or beside dpsim/ in a checkout."""

from __future__ import annotations

from pathlib import Path


def bundled(name: str) -> Path:
    """Return the folder `name` of this distribution.

    Raises:
        FileNotFoundError: The installation is incomplete.
    """
    here = Path(__file__).parent
    for root in (here / "_bundled", here.parent):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(f"{name}/ is missing from this installation of dpsim; install it again")
