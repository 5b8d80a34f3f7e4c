"""The launcher with `fake_station` in place of the station."""

import sys

from gluon_esgd.launch import plan
from gluon_esgd.launch.arguments import main

plan.STATION = ("-m", "tests.launch.fake_station")
sys.exit(main())
