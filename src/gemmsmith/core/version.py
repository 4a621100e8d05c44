"""The version of the package: that of the installed distribution, which its build takes from git's tags."""

from importlib import metadata

try:
    __version__ = metadata.version("gemmsmith")
except metadata.PackageNotFoundError:  # imported from a folder that is not installed
    __version__ = "0+unknown"
