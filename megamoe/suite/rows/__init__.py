"""Rows of the table, by topic.

Every module here whose name does not start with an underscore has ``ROWS``, a tuple of operations;
megamoe.suite.table collects them.
"""
