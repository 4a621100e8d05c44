"""Device code of epilogues: lowers an epilogue graph to the instructions of a kernel, subtile by subtile."""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)
