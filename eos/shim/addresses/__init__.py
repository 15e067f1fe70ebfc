"""Replace the brokers' addresses in responses by local ports, and stop responses that would leak one."""
