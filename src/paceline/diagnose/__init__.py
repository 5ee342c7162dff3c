"""What a measured step spent its time on, what to change, and where it differs from a prediction."""
