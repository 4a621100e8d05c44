"""Benchmarks: scripts that are modules, run from the repository's root as in `python -m benchmarks.speed.dense`.

speed       GEMMs, epilogues, quantization and the host against torch and cuBLASLt
fit         surveys and sweeps of configs, and the fit of the cost model to them
ladder      the ladder's kernels: their speed, and the simulator's counters against Nsight Compute's
torch       layers and training steps of PyTorch models
tools       pictures, kernels against their earlier versions, runs under compute-sanitizer, mutants of the library
results     what was measured; rows.py reads it

The other files here are shared: suite.py has the problems, random_epilogues.py random graphs, timing.py and contest.py
time, portions.py runs in parts, and cublaslt.py calls cuBLASLt.
"""
