"""An App that runs on a session: error policies, dead letters, slow functions, hooks, many processes."""
