"""`python -m specdecode`: the command line."""

from specdecode.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
