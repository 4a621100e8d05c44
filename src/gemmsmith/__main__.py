"""`python -m gemmsmith`: the command."""

from gemmsmith.cli import main

main()
