"""`python -m stoker` is `stoker`."""

from stoker.cli.main import main

if __name__ == "__main__":
    main()
