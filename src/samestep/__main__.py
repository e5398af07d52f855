"""``python -m samestep``: the same command line, for when the script is not on the path."""

from samestep.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
