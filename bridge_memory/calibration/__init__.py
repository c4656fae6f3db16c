"""The journal of a run's reports, and residuals for the next estimate of the same run.

``live`` writes them; ``compare`` and the command line read them.
"""

from bridge_memory.calibration.residuals import Residual, calibrated, config_digest, load, residuals_of, save

__all__ = ["Residual", "calibrated", "config_digest", "load", "residuals_of", "save"]
