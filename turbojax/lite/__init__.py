"""Quantised checkpoints out: calibration, the methods that round weights, and how what they cost is measured."""
