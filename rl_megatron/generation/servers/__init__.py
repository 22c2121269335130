"""What rollout engines over HTTP share: the client, the routing of requests, server processes and `ServerEngine`."""
