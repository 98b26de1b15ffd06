"""Training loops put together from pieces at random, under every strategy against one process."""
