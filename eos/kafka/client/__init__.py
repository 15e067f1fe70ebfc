"""Provides what clients of the cluster need: settings, logins, errors, calls with deadlines, and the World."""
