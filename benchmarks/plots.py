"""Draws the plots of results of `outergrad bench` again.

python benchmarks/plots.py benchmarks/results/*.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from outergrad_lab.bench.plot import plot
from outergrad_lab.bench.results import Results

for name in sys.argv[1:]:
    plot(Results.load(Path(name)), Path(name).with_suffix(".png"))
