"""Long runs: failures, goodput and days; and a Cluster corrected by what runs measured."""
