"""Parts of the benchmarks of learning."""
