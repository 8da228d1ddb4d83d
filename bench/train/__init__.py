"""Training speed: Stoker beside other trainers and loops written by hand, same model, weights, order and batch."""
