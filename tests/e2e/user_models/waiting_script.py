"""A script that reports nothing, and ends once somebody writes to the pipe that it is told."""

import sys
from pathlib import Path

Path(sys.argv[1]).read_text()
