"""Expert parallelism: experts of mixture-of-experts layers divided over ranks."""
