"""The former place of sharing/export.py, which scripts and published commands call."""

import sys

from sharing.export import main

if __name__ == "__main__":
    sys.exit(main())
