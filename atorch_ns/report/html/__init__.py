"""The report as one HTML page with inline SVG."""
