"""Benchmarks of the engine: loads, latencies, and how far from the machine's own limits a step is."""
