"""`python -m longgen`."""

import sys

from longgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
