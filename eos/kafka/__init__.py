"""Talks to the cluster: clients and their settings (`client`), queries and changes (`admin`). Knows no App."""
