"""The `saltflat` command, also as `python -m saltflat`."""

import sys


def main() -> None:
    """Run the command line, or say what is missing for it."""
    try:
        from saltflat.cli import main as run
    except ImportError as error:
        print(f"saltflat: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
