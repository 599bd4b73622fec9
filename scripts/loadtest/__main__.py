"""python -m scripts.loadtest"""

import sys

from scripts.loadtest.cli import main

if __name__ == "__main__":
    sys.exit(main())
