"""`python -m shoal.launch`: the agent that starts the ranks of this machine for a fleet."""

import sys

from shoal.launch.agent import main

sys.exit(main())
