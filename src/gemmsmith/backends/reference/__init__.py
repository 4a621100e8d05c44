"""The float64 reference, with which the results of every other backend are compared."""
