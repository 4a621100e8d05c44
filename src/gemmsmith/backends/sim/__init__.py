"""The simulator: executes a kernel's description on the CPU and checks every barrier and asynchronous hazard."""

from gemmsmith.backends.sim.engine import SimulationResult, simulate
from gemmsmith.backends.sim.memory.memory import GlobalMemory
from gemmsmith.backends.sim.report.hazards import Hazard
from gemmsmith.backends.sim.report.record import Record
from gemmsmith.backends.sim.report.timeline import Span, Timeline
from gemmsmith.backends.sim.report.verdict import Verdict

__all__ = ["GlobalMemory", "Hazard", "Record", "SimulationResult", "Span", "Timeline", "Verdict", "simulate"]
