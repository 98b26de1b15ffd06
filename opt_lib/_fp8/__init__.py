"""fp8 training: which linears compute in fp8, and the packages that do it."""
