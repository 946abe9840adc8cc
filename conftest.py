"""Options, header, strict skips, seeds and summary: megamoe.suite.pytest_plugin."""

pytest_plugins = ["megamoe.suite.pytest_plugin", "pytester"]
