"""Sentences listed with an estimate: unmodelled features, options without effect, assumptions."""
