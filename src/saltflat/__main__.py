"""`python -m saltflat` is `saltflat`."""

from saltflat.cli import main

if __name__ == "__main__":
    main()
