"""`python -m dovetail` is the `dovetail` command."""

import sys

from dovetail.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
