"""Write the headers of the engine: an MLP's three GEMMs, each planned for few rows and for many.

    python export.py build

Any of them serves any number of rows; engine.cpp chooses by it. No GPU is needed. The sizes are in engine.cpp, too.
"""

import sys

import gemmsmith
from gemmsmith import Spec

WIDTH, HIDDEN, CLASSES = 256, 1024, 512


def bias_gelu(acc, bias):
    return (acc + bias).gelu()


def residual(acc, x):
    return acc + x


def weight(inputs, outputs):
    """As torch.nn.Linear has it: outputs x inputs, hence column-major as b."""
    return Spec((inputs, outputs), "bf16", (1, inputs))


for size, rows in (("small", 32), ("large", 4096)):
    x, hidden = Spec((rows, WIDTH), "bf16"), Spec((rows, HIDDEN), "bf16")
    plans = {
        "up": gemmsmith.plan(x, weight(WIDTH, HIDDEN), epilogue=bias_gelu, bias=Spec((HIDDEN,), "bf16")),
        "down": gemmsmith.plan(hidden, weight(HIDDEN, WIDTH), epilogue=residual, x=x),
        "head": gemmsmith.plan(x, weight(WIDTH, CLASSES)),
    }
    for name, plan in plans.items():
        print(plan.export(sys.argv[1], f"{name}_{size}"))
