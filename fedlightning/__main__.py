"""`python -m fedlightning`: the console script `fedlightning`, for machines whose PATH lacks it."""

import sys

from fedlightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
