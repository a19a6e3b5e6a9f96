"""Training as a service: a server for the remote training interface of the `tinker` client. Models lease slots only while they work."""
