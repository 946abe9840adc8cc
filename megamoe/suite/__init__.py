"""The table of operations and its runner. See docs/adding_an_operation.md."""
