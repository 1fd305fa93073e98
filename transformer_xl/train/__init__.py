"""Training: one step as a function, its state, and the loop that measures, saves and resumes."""
