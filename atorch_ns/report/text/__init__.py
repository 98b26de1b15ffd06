"""The report as plain text: tables and sentences."""
