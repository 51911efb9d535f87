"""What a race over limited links is made of: a case, contestants, faults, and what they used."""
