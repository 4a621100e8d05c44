"""The float64 reference, which the results of every other backend are compared with."""
