"""Traces by OpenTelemetry, where the extra `otel` is installed and an endpoint is set."""
