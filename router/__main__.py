"""`python -m router` is `laneway serve`."""

import sys

from router.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
