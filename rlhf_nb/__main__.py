"""`python -m rlhf_nb` is `rlhf-nb`."""

from rlhf_nb.cli.main import app

if __name__ == "__main__":
    app()
