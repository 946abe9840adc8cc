"""Subcommands of `megamoe`, each loaded when it is called."""
