"""Looking at loops, plans, runs and machines: explain, analyze, doctor, interpret."""
