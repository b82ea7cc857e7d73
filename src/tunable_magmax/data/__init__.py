"""Files of samples, labels and features -> what encoders and preferences take. One small file per kind."""
