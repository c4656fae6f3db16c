"""Reports: an Estimate as text, as JSON, in a file. A report knows an Estimate and nothing of how it came about."""
