"""From a Python function, a visitor tree or a named fusion to a graph, and how graphs are shown."""
