"""`python -m penstock`: the command line."""

from penstock.cli.main import main

if __name__ == "__main__":
    main()
