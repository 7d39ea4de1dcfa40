"""Settings shared by all tests."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the engine does, before anything loads torch

sys.path.insert(0, str(Path(__file__).parent))
