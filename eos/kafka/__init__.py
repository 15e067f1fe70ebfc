"""The cluster: its settings, its errors, its clients and what is asked of it. Knows no App."""
