"""Progress on the terminal, metrics, the timeline and the report.

Everything here only reads or writes the run folder, and a failure here never changes the training result. Heavy packages are imported
when they are used, so import the classes from their files.
"""
