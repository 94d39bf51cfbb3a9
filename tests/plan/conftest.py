"""The planner's tests use the small model of the trainer's."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "train"))
