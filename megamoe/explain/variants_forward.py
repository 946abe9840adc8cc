"""Knobs of the forward: activation, scales and the order of sums. Registered like the others."""
