"""Training speed: Stoker against other trainers and loops written by hand, same model, weights, order and batch."""
