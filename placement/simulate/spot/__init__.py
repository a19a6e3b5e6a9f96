"""Preemptible devices in the simulator: how many there are, rollouts on them, and the policies that use them."""
