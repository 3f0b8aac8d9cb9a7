"""`python -m models.export`, as pages and scripts before the folder sharing/ call it."""

import sys

from sharing.export import main

if __name__ == "__main__":
    sys.exit(main())
