"""`python -m mlxspec` is the command `mlxspec`."""

import sys

from mlxspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
