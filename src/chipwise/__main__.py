"""`python -m chipwise`: the `chipwise` command where its script is not on the path."""

from .cli import main

main()
