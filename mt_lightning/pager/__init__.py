"""When bytes move: budget, pool, replacement, prediction. Policy only; no file is opened here."""
