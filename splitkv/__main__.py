"""``python -m splitkv``, and the console script."""

import sys

from splitkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
