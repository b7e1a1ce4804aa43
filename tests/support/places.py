"""Where the repository and the real data sets are."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DATA = Path(os.environ.get("OUTERGRAD_DATA", REPOSITORY.parent / "shared" / "data"))
