"""`gemmsmith explain`: an epilogue as a visitor tree, pass by pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gemmsmith.cli import options
from gemmsmith.cli.problem import make_plan, make_request
from gemmsmith.cli.tables import print_outcome, wrapped
from gemmsmith.graph.frontend.show import format_tree, plot_graphs
from gemmsmith.graph.passes import optimize, trace_passes
from gemmsmith.host.plans import Plan


@click.command(cls=options.ProblemCommand)
@options.gemm
@options.picture
@options.as_json
def explain(sizes: options.PartialSizes, picture: Path | None, as_json: bool, **choices: Any) -> None:
    """Show an epilogue as a visitor tree, pass by pass.

    It is printed as written, and after each pass that changes it; the picture shows it before and after all passes. A
    predefined epilogue has its own operands, and gelu if it takes an activation. The default sizes are 4096x256x4096.

    Then follows what bounds the kernel (`Plan.why`).

    \b
    Example: gemmsmith explain --epilogue LinCombPerColBiasEltAct --operand beta=row
    """
    if not choices["epilogue"]:
        raise click.MissingParameter(param_hint="'--epilogue'", param_type="option")
    request = make_request(choices, options.complete_sizes(sizes, (4096, 256, 4096), choices["groups"]))
    plan = make_plan(request, choices)
    why, source_graph = Plan(plan).why, plan.binding.source_graph
    graphs = [("as written", source_graph), *trace_passes(source_graph)]
    if picture:
        plot_graphs([graphs[0], ("after the passes", optimize(source_graph))], picture)
    steps = [{"step": name, "tree": format_tree(graph)} for name, graph in graphs]
    text = "\n".join(f"{click.style(x['step'] + ':', bold=True)}\n{x['tree']}\n" for x in steps)
    text += f"\n{click.style('config:', bold=True)}\n{wrapped(why)}"
    print_outcome({"steps": steps, "why": why}, text, picture, as_json)
