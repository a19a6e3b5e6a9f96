"""What a run tells the world: progress on the terminal, metrics, the timeline and the report.

Everything here reads or writes the run folder only; a failure here never changes what is learned. Nothing heavy is imported
before it is used: import the classes from their files (`watch.metrics`, `watch.progress`, `watch.timeline`, `watch.report`).
"""
