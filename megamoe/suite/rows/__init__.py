"""Rows of the table, by topic. Every module here has ``ROWS``, a tuple of operations; megamoe.suite.table collects them."""
