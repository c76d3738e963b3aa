"""`python -m router` is `laneway`; without the name of a command it serves."""

import sys

from router.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    serves = not words or words[0].startswith("-")
    main(["serve", *words] if serves else words)
