"""The operators and the layouts that all tensor tests share lie beside the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
