"""Messages between ranks and coordinator; ``make proto`` writes ``coordinator_pb2``."""
