"""Reports: an Estimate as text, JSON or a page. Reports depend only on `Estimate`."""
