"""Install the kit and, given a port, serve on it in the foreground: `... kit [PORT [FLAGS]]`."""

import os
import sys
import tempfile
from pathlib import Path

from . import command, environment, home, install, is_installed, write_model


def main(arguments: list[str]) -> None:
    if not is_installed():
        print(f"Installing SGLang for CPU into {home()} (about 3 GB, a few minutes)", flush=True)
    print(install())
    if not arguments:
        return
    port, *flags = arguments
    scratch = Path(tempfile.mkdtemp(prefix="sglang-"))
    write_model(scratch / "model")
    words = command(*flags, model=scratch / "model", port=int(port))
    os.execve(words[0], words, environment(scratch=scratch))


if __name__ == "__main__":
    main(sys.argv[1:])
