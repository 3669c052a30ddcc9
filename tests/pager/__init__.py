"""Budget, pool, order and plan: policy alone, on memory."""
