"""Parts of the benchmarks that run in the simulator."""
