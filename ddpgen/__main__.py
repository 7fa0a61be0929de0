"""Start ddpgen with `python -m ddpgen`."""

import sys

from ddpgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
