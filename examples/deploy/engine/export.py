"""Write the headers of the engine: an MLP's three GEMMs, each planned for 32 rows and for more.

    python export.py build

Each header serves any number of rows, and chooses the kernel by it. No GPU is needed. engine.cpp has the sizes, too.
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


def plans(rows):
    x, hidden = Spec((rows, WIDTH), "bf16"), Spec((rows, HIDDEN), "bf16")
    return {
        "up": gemmsmith.plan(x, weight(WIDTH, HIDDEN), epilogue=bias_gelu, bias=Spec((HIDDEN,), "bf16")),
        "down": gemmsmith.plan(hidden, weight(HIDDEN, WIDTH), epilogue=residual, x=x),
        "head": gemmsmith.plan(x, weight(WIDTH, CLASSES)),
    }


few, many = plans(32), plans(4096)
for name, plan in few.items():
    print(plan.export(sys.argv[1], name, [many[name]]))
