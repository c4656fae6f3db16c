"""What is listed beside the numbers of an estimate: features not modelled, options without effect, assumptions."""
