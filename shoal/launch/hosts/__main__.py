"""`python -m shoal.launch.hosts`: the agent that starts the ranks of this machine for a fleet."""

import sys

from shoal.launch.hosts.agent import main

sys.exit(main())
