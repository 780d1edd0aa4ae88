"""What the tests of split products share lies beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
