"""What every arm trains: the same model, the same samples in the same order, the same log of it."""
