"""`python -m quire.dynamo NAME=VALUE ...`: one worker, until it is stopped by SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys

from quire.errors import QuireError


def main() -> None:
    """Run a worker with the options on the command line."""
    try:
        from dynamo.common.backend.run import run
    except ModuleNotFoundError as error:
        sys.exit(
            f"Error: quire.dynamo needs {error.name}, which is not installed; pip install 'quire[dynamo]'"
        )
    from quire.dynamo.engine import QuireEngine

    try:
        run(QuireEngine)
    except QuireError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
