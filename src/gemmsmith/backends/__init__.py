"""Where a kernel runs: on a GPU (cuda), on any CPU (sim), and what its answer must be (reference)."""
