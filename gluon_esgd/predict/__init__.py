"""A cost model: how long a step takes, in any configuration on any cluster.

>>> from gluon_esgd.predict import Cluster, Configuration, Work, predict
>>> cluster = Cluster(hosts=6, workers_per_host=2, link_bytes_per_s=125e6)
>>> work = Work(parameter_bytes=102e6, compute_s=0.35)
>>> predict(work, cluster, Configuration("esgd", workers=12, clients=2)).bottleneck
'wire inside clients'

Pure arithmetic on a few numbers: no MXNet, no MPI, nothing is measured. What it assumes is in
``docs/predict.md``; `calibrate` fits its constants to what was measured on a few hosts.
"""

from .calibration import (
    Calibration,
    Measurement,
    Residual,
    calibrate,
    compare,
    read_constants,
    read_measurements,
    write_measurements,
)
from .cluster import Cluster, Constants
from .configuration import RULES, Configuration
from .prediction import Prediction, predict
from .recommendation import Choice, recommend
from .work import MODELS, Work

__all__ = [
    "MODELS",
    "RULES",
    "Calibration",
    "Choice",
    "Cluster",
    "Configuration",
    "Constants",
    "Measurement",
    "Prediction",
    "Residual",
    "Work",
    "calibrate",
    "compare",
    "predict",
    "read_constants",
    "read_measurements",
    "recommend",
    "write_measurements",
]
