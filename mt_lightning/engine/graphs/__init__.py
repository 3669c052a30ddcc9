"""The autograd graphs of units, kept between forward and backward where memory allows."""
