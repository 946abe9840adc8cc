"""``python -m megamoe``."""

from megamoe.cli import main

if __name__ == "__main__":
    main(prog_name="megamoe")
