"""What a client of the cluster needs: settings, logins, errors, calls with deadlines, the World that makes clients."""
