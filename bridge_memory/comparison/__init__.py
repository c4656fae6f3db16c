"""An estimate beside what a run says of itself: training logs, reports of ranks, CUDA memory snapshots."""

#: Of a comparison as JSON.
SCHEMA = "bridge-memory/compare/1"
