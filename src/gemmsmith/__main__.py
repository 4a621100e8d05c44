"""`python -m gemmsmith`: the command."""

from gemmsmith.cli.commands import main

main()
