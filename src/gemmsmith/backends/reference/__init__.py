"""What a problem means, in float64: the answer every other backend is compared with."""
