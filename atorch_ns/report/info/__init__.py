"""The data of a report, each table and picture as plain values."""
