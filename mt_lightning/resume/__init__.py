"""What a run is beside its pages: taken when a step ends, given back to a run that goes on."""
