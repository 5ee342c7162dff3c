"""The test finds its scripts and contracts as the ranks do: by the names of files beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
