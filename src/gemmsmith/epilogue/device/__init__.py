"""Device code of epilogues: lowers an epilogue graph to the instructions of a kernel, subtile by subtile."""
