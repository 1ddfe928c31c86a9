"""What makes the pages of the site that nobody writes: of ops and modules, tables, pictures and plots."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
