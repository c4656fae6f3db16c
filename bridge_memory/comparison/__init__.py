"""An estimate beside what a run says of itself: training logs, reports of ranks, CUDA memory snapshots."""
