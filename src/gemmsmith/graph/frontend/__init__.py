"""Front end: from a Python function, a visitor tree or a named fusion to an epilogue graph; display of graphs."""
