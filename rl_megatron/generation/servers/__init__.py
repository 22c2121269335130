"""The common parts of rollout engines over HTTP: client, routing of requests, server processes, `ServerEngine`."""
