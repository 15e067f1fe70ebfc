"""What looks at a cluster or changes it: preflight, transactions, offsets of groups, topics read and watched."""
