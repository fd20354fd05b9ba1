"""Send the reports of runs to experiment trackers: MLflow and Weights & Biases."""
