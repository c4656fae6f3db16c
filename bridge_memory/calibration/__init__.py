"""What a run left behind: the journal of its reports, and residuals for the next estimate of the same run.

Below ``live``, which writes them, and ``compare`` and the command line, which read them.
"""

from bridge_memory.calibration.residuals import Residual, calibrated, config_digest, load, residuals_of, save

__all__ = ["Residual", "calibrated", "config_digest", "load", "residuals_of", "save"]
