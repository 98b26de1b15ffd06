"""The coordinator over gRPC: client, server, authentication."""
