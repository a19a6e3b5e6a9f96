"""What exists only for runs on the cores of one machine. A run on a cluster's GPUs meets nothing of it but the calls of its doors.

local_ray.py        door to a small private Ray: without dashboard, with stand-ins for its agents (agent_stand_in.py)
forked_workers.py   door to workers that are forked with everything imported (fork_server.py, fork_client.py)
cpu_bfloat16.py     door to float32 products of bfloat16 matrices: `use_float32_products`
processor.py        door to what products the processor has instructions for
"""
