"""Settings shared by all tests."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine does, before anything loads torch

sys.path.insert(0, str(Path(__file__).parent))
