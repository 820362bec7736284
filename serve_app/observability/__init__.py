"""The observation of requests: metrics, the request log and OpenTelemetry spans."""
