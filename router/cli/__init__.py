"""The command `laneway`: serve, worker, workers, config, check-config, demo, sim.

Every command ends with a plain message and an exit status: 0 done, 1 could not, 2 wrong use or a
bad configuration. The heavy parts are imported inside the commands, so that `--help` is quick.
"""

from router.cli.commands import main

__all__ = ["main"]
