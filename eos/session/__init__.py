"""One transaction after the other over a consumer and its producers: what decides commit or abort."""
