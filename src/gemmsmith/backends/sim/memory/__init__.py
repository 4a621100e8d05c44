"""Memory as bytes, and which accesses happen before which."""
