"""The simulator: executes a kernel's description on the CPU and checks every barrier and asynchronous hazard."""

from gemmsmith.backends.sim.engine import SimulationResult, simulate
from gemmsmith.backends.sim.hazards import Hazard
from gemmsmith.backends.sim.memory import GlobalMemory
from gemmsmith.backends.sim.timeline import Span, Timeline

__all__ = ["GlobalMemory", "Hazard", "SimulationResult", "Span", "Timeline", "simulate"]
