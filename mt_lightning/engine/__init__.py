"""A torch module living on pages: find its units, bind, run, collect gradients, update, park."""
