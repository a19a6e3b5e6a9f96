"""Other systems, run beside this one."""
