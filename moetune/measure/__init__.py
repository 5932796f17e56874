"""Ways to answer a trial: live on a GPU, from recorded trials, or by the compiler alone."""
