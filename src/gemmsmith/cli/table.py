"""`gemmsmith table`: the configs that were measured here, as a file that other machines and models take along."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import click

from gemmsmith.cli import options
from gemmsmith.core.errors import DeviceError
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.measured_configs import Entry, Key


@click.command()
@click.argument("action", type=click.Choice(["list", "export", "merge", "load"]))
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False, path_type=Path))
@options.as_json
def table(action: str, files: tuple[Path, ...], as_json: bool) -> None:
    """List, export, merge and load measured configs, which `tune` and `autotune` store.

    \b
    list             what was measured on this machine's GPU
    export FILE      write it to FILE
    merge FILE...    write the configs of all FILEs but the last to the last one; of two for
                     one problem and GPU the faster one
    load FILE...     store the configs of FILEs as if they had been measured here, if the GPU
                     is the same

    GEMMSMITH_TABLE names exported files that plans read without loading them.

    \b
    Example: gemmsmith table list
    """
    counts = {"list": range(1), "export": range(1, 2), "merge": range(2, 1000), "load": range(1, 1000)}[action]
    if len(files) not in counts:
        raise click.UsageError(f"FILES: got {len(files)}; {action} takes {counts[0]}{' or more' * (len(counts) > 1)}")
    match action:
        case "list" | "export":
            entries = measured_configs.entries()
        case "merge":
            entries = _fastest(_read(files[:-1]))
        case "load":
            entries = _load(_read(files))
    if action in ("export", "merge"):
        measured_configs.write_table(files[-1], entries)
    if as_json:
        click.echo(json.dumps({"entries": [x.to_json() for x in entries]}, indent=2))
        return
    for x in entries if action == "list" else ():
        kinds = " fused" * bool(x.key.epilogue) + " grouped" * bool(x.key.groups)
        click.echo(f"{x.m}x{x.key.n}x{x.key.k} {x.key.operands}{kinds}: {x.us:.1f} us\n    {x.config}")
    click.echo(f"{len(entries)} configs")


def _read(files: Iterable[Path]) -> list[Entry]:
    """Return the entries of exported tables. Raises ArgumentError for a file that is none."""
    return [entry for file in files for entry in measured_configs.read_table(file)]


def _fastest(entries: Iterable[Entry]) -> list[Entry]:
    fastest: dict[tuple[str, Key], Entry] = {}
    for entry in sorted(entries, key=lambda x: x.us):
        fastest.setdefault((entry.gpu, entry.key), entry)
    return list(fastest.values())


def _load(entries: Iterable[Entry]) -> list[Entry]:
    """Store the entries of this machine's GPU, and return them."""
    from gemmsmith.backends.cuda import driver

    if not driver.is_available():
        raise DeviceError("load: there is no GPU that the configs could be for; name the FILE in GEMMSMITH_TABLE")
    gpu = driver.device_attributes(0).name
    loaded = [entry for entry in entries if entry.gpu == gpu]
    measured_configs.save(loaded)
    return loaded
