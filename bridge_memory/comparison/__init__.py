"""Compares an estimate with measured figures: training logs, reports of ranks, CUDA memory snapshots."""
