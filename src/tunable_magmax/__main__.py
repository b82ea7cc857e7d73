"""`python -m tunable_magmax` is `tmx`."""

from tunable_magmax.cli.app import main

main()
