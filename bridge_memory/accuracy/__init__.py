"""Errors of estimates of measured runs by family and feature, and constants refitted with a family left out."""
